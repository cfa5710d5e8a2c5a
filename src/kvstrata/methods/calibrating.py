"""Making a calibration artefact: samples of selections that dense attention has measured, sorted into bins.

Each bin gets the k-th smallest omitted mass, k = ceil((n + 1) c): of one more selection that is exchangeable with the n
samples of the bin, at least the share c omits no more (split conformal prediction within categories; Vovk, Gammerman
and Shafer 2005, Algorithmic Learning in a Random World, sections 2.2 and 4.5). A bin with too few samples for its k
gets 1. Bounds are then made not to fall as the raw estimate rises, which only raises them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvstrata.contract.budget import SelectionBudget
from kvstrata.contract.identity import ChunkContext
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.calibration import NO_OPINION, Calibration, CalibrationBinding, CalibrationCurve, budget_key
from kvstrata.methods.interface import Method
from kvstrata.methods.selection import Selection

__all__ = ["CalibrationSample", "calibrate"]


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """One selection of one layer. raw: the greatest of `Selection.estimate`, `None` without one. omitted: the greatest
    omitted mass over its query heads, by dense attention. budget: see `budget_key`."""

    raw: float | None
    omitted: float
    budget: str
    layer: int

    def __post_init__(self) -> None:
        for name, value in (("raw", NO_OPINION if self.raw is None else self.raw), ("omitted", self.omitted)):
            if not 0 <= value <= 1 + 1e-6:
                raise _invalid(f"CalibrationSample.{name}", value, "a share from 0 to 1")

    @classmethod
    def of(cls, selection: Selection, omitted: Tensor, budget: SelectionBudget, layer: int) -> CalibrationSample:
        """The sample of a selection whose `omitted` mass, of any shape, the dense shadow has measured."""
        raw = None if selection.estimate is None else float(selection.estimate.max())
        return cls(raw, float(omitted.max()), budget_key(budget), layer)


def calibrate(
    method: Method[Any],
    context: ChunkContext,
    samples: Iterable[CalibrationSample],
    *,
    confidence: float = 0.9,
    bins: int = 8,
    per_layer: bool = False,
) -> Calibration:
    """Make the artefact of `method` on the model of `context`.

    bins: at most so many for each curve, of about equally many samples, and fewer where samples are few. per_layer: a
    curve for each layer beside the one for all.

    Errors: `ConfigurationError` without samples, or for a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise _invalid("confidence", confidence, "more than 0 and less than 1")
    if bins < 1:
        raise _invalid("bins", bins, "at least 1")
    groups: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
    for sample in samples:
        pair = (NO_OPINION if sample.raw is None else sample.raw, min(sample.omitted, 1.0))
        for layer in (None, sample.layer) if per_layer else (None,):
            groups.setdefault((sample.budget, layer), []).append(pair)
    if not groups:
        raise _invalid("samples", [], "at least one")
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], -1 if group[0][1] is None else group[0][1]))
    curves = tuple(_curve(budget, layer, pairs, confidence, bins) for (budget, layer), pairs in ordered)
    return Calibration(CalibrationBinding.of(method, context), confidence, curves)


def _curve(
    budget: str, layer: int | None, pairs: Sequence[tuple[float, float]], confidence: float, bins: int
) -> CalibrationCurve:
    ranked = sorted(pairs)
    raws = [raw for raw, _ in ranked]
    bins = max(1, min(bins, math.floor(len(ranked) * (1 - confidence) + 1e-9)))
    # Equal raw estimates stay in one bin.
    upper = sorted({raws[math.ceil(len(raws) * (k + 1) / bins) - 1] for k in range(bins)})
    bounds: list[float] = []
    start = 0
    for edge in upper:
        omitted = []
        while start < len(ranked) and ranked[start][0] <= edge:
            omitted.append(ranked[start][1])
            start += 1
        bounds.append(max(_upper_quantile(omitted, confidence), *bounds[-1:], 0.0))
    return CalibrationCurve(budget, layer, tuple(upper), tuple(bounds), len(ranked))


def _upper_quantile(omitted: list[float], confidence: float) -> float:
    place = math.ceil((len(omitted) + 1) * confidence - 1e-9)
    return sorted(omitted)[place - 1] if place <= len(omitted) else 1.0


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be {wanted}, got {value!r}")
