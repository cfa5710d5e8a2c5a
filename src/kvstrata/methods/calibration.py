"""From a method's own belief in what it left out to a bound that holds with a stated confidence: the artefact.

`kvstrata.methods.calibrating` makes it from samples. Nothing is promised for another model, method, budget, layer or
kind of text than was sampled: an artefact is bound to the first two and has a curve for each budget and layer, and a
raw estimate above all samples gets 1.
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.budget import SelectionBudget
from kvstrata.contract.encoding import digest
from kvstrata.contract.identity import ChunkContext
from kvstrata.cost.prepublication import EstimateSource
from kvstrata.errors import ConfigurationError, Reason, RetrievalError
from kvstrata.methods.interface import Method

__all__ = [
    "NO_OPINION",
    "Calibration",
    "CalibrationBinding",
    "CalibrationCurve",
    "MassEstimate",
    "budget_key",
]

_FORMAT = 1
NO_OPINION = 0.0
"""Stands for the raw estimate of a method that gives none."""


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
        value = NO_OPINION if raw is None else raw
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


def _damaged(cause: str) -> ConfigurationError:
    return ConfigurationError(Reason.CALIBRATION_DAMAGED, f"calibration: {cause}", "make the artefact again")


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be {wanted}, got {value!r}")
