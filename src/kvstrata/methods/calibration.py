"""From a method's own belief in what it left out to a bound that holds with a stated confidence.

Samples pair the raw estimate of a selection with the mass that dense attention says was omitted. They are sorted into
bins by the raw estimate; each bin gets the k-th smallest omitted mass, k = ceil((n + 1) c): of one more selection that
is exchangeable with the n samples of the bin, at least the share c omits no more (split conformal prediction within
categories; Vovk, Gammerman and Shafer 2005, Algorithmic Learning in a Random World, sections 2.2 and 4.5). A bin with
too few samples for its k gets 1. Bounds are then made not to fall as the raw estimate rises, which only raises them.

Nothing is promised for another model, method, budget, layer or kind of text than was sampled: an artefact is bound to
the first two and has a curve for each budget and layer, and a raw estimate above all samples gets 1.
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.budget import SelectionBudget
from kvstrata.contract.encoding import digest
from kvstrata.contract.identity import ChunkContext
from kvstrata.cost.prepublication import EstimateSource
from kvstrata.errors import ConfigurationError, Reason, RetrievalError
from kvstrata.methods.interface import Method

__all__ = [
    "Calibration",
    "CalibrationBinding",
    "CalibrationCurve",
    "CalibrationSample",
    "MassEstimate",
    "budget_key",
    "calibrate",
]

_FORMAT = 1
_NO_OPINION = 0.0


@dataclass(frozen=True, slots=True)
class MassEstimate:
    """omitted: share of the attention mass that is believed to be left out at most. confidence: how often that holds.
    raw: what the method said, `None` for nothing."""

    omitted: float
    confidence: float
    source: EstimateSource
    raw: float | None = None

    @classmethod
    def none(cls, raw: float | None = None) -> MassEstimate:
        """Nothing is known: all of it may be omitted."""
        return cls(1.0, 0.0, EstimateSource.NONE, raw)


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """One selection of one layer. raw: the greatest of `Selection.estimate`, `None` without one. omitted: the greatest
    omitted mass over its query heads, by dense attention. budget: see `budget_key`."""

    raw: float | None
    omitted: float
    budget: str
    layer: int

    def __post_init__(self) -> None:
        for name, value in (("raw", _NO_OPINION if self.raw is None else self.raw), ("omitted", self.omitted)):
            if not 0 <= value <= 1 + 1e-6:
                raise _invalid(f"CalibrationSample.{name}", value, "a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class CalibrationCurve:
    """budget, layer: of the samples; layer `None` for all layers together. upper: greatest raw estimate of each bin,
    ascending. bounds: omitted mass that goes with each, not descending. samples: of all bins."""

    budget: str
    layer: int | None
    upper: tuple[float, ...]
    bounds: tuple[float, ...]
    samples: int

    def __post_init__(self) -> None:
        fits = len(self.upper) == len(self.bounds) > 0 and all(0 <= bound <= 1 for bound in self.bounds)
        if not fits or list(self.bounds) != sorted(self.bounds) or list(self.upper) != sorted(set(self.upper)):
            raise _invalid("CalibrationCurve", (self.upper, self.bounds), "ascending bins with bounds that do not fall")

    def bound(self, raw: float) -> float:
        """Omitted mass for a raw estimate; 1 above all samples."""
        place = bisect_left(self.upper, raw)
        return self.bounds[place] if place < len(self.bounds) else 1.0


@dataclass(frozen=True, slots=True)
class CalibrationBinding:
    """What an artefact is good for: hexadecimal digests, and the method's name for messages."""

    method_name: str
    method: str
    model: str
    adapters: str
    cache_abi: str
    rope: str

    @classmethod
    def of(cls, method: Method[Any], context: ChunkContext) -> CalibrationBinding:
        """The binding of `method` in its configuration to the model, geometry and rotary settings of `context`."""
        model = (context.model.artefact, context.model.weights_generation)
        return cls(
            method.contract.name,
            method.digest,
            digest("calibration-model/1", model).hex(),
            digest("calibration-adapters/1", context.model.adapters).hex(),
            digest("calibration-abi/1", context.abi).hex(),
            digest("calibration-rope/1", context.position).hex(),
        )


_BINDING_REASONS = {
    "method": Reason.METHOD_MISMATCH,
    "model": Reason.MODEL_MISMATCH,
    "adapters": Reason.ADAPTER_MISMATCH,
    "cache_abi": Reason.CACHE_ABI_MISMATCH,
    "rope": Reason.ROPE_CONFIG_MISMATCH,
}


@dataclass(frozen=True)
class Calibration:
    """The artefact: bound to one method and one model, good at `confidence`. `to_json` and `from_json` are inverse."""

    binding: CalibrationBinding
    confidence: float
    curves: tuple[CalibrationCurve, ...]

    @property
    def digest(self) -> str:
        """Hexadecimal digest over all of it, for receipts."""
        return digest("calibration/1", self).hex()

    def require(self, method: Method[Any], context: ChunkContext) -> Calibration:
        """This artefact. Errors: `RetrievalError` with METHOD_MISMATCH, MODEL_MISMATCH, ADAPTER_MISMATCH,
        CACHE_ABI_MISMATCH or ROPE_CONFIG_MISMATCH when it was made for another."""
        wanted = CalibrationBinding.of(method, context)
        for field, reason in _BINDING_REASONS.items():
            if getattr(self.binding, field) != getattr(wanted, field):
                raise RetrievalError(
                    reason,
                    f"calibration.{field}: the artefact was made for another one "
                    f"(method {self.binding.method_name!r}, asked for {wanted.method_name!r})",
                    "calibrate this method on this model, or go on without an artefact",
                    field=f"calibration.{field}",
                )
        return self

    def estimate(self, raw: float | None, budget: str, layer: int) -> MassEstimate:
        """The bound for one selection; `MassEstimate.none` for a budget or layer that was not sampled, or a raw
        estimate that is NaN. budget: see `budget_key`."""
        curve = self._curve_of(budget, layer)
        value = _NO_OPINION if raw is None else raw
        if curve is None or math.isnan(value):
            return MassEstimate.none(raw)
        return MassEstimate(curve.bound(value), self.confidence, EstimateSource.CALIBRATION, raw)

    def covers(self, budget: str, layer: int) -> bool:
        """Whether that budget was sampled in that layer, or in all of them together."""
        return self._curve_of(budget, layer) is not None

    def _curve_of(self, budget: str, layer: int) -> CalibrationCurve | None:
        curves = {curve.layer: curve for curve in self.curves if curve.budget == budget}
        return curves.get(layer) or curves.get(None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with a digest over them."""
        return {"format": _FORMAT, **json.loads(json.dumps(dataclasses.asdict(self))), "digest": self.digest}

    @classmethod
    def from_json(cls, data: Any) -> Calibration:
        """Inverse of `to_json`. Errors: `ConfigurationError` with CALIBRATION_DAMAGED for anything else."""
        try:
            curves = tuple(
                CalibrationCurve(
                    curve["budget"], curve["layer"], tuple(curve["upper"]), tuple(curve["bounds"]), curve["samples"]
                )
                for curve in data["curves"]
            )
            found = cls(CalibrationBinding(**data["binding"]), float(data["confidence"]), curves)
            whole = data["format"] == _FORMAT and data["digest"] == found.digest
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(f"it is no calibration artefact: {error}") from error
        if not whole:
            raise _damaged("its format or its digest is not that of its contents")
        return found


def budget_key(budget: SelectionBudget) -> str:
    """What curves are found by: the budget in words."""
    return repr(budget)


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
    curve for each layer beside the one for all. Errors: `ConfigurationError` without samples, or for a confidence
    outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise _invalid("confidence", confidence, "more than 0 and less than 1")
    if bins < 1:
        raise _invalid("bins", bins, "at least 1")
    groups: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
    for sample in samples:
        pair = (_NO_OPINION if sample.raw is None else sample.raw, min(sample.omitted, 1.0))
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


def _damaged(cause: str) -> ConfigurationError:
    return ConfigurationError(Reason.CALIBRATION_DAMAGED, f"calibration: {cause}", "make the artefact again")


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be {wanted}, got {value!r}")
