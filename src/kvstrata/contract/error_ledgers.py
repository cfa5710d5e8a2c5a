"""Four errors that a selecting step may make, kept apart: none makes up for another, so there is no sum of them.

A ledger that was not measured is `None`, which is not zero.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.method import AnswerClass
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["ErrorLedgers", "PayloadError", "ReductionError", "RepresentationError", "SupportLedger"]


@dataclass(frozen=True, slots=True)
class RepresentationError:
    """How far the index's scores are from those of the rows: of what ranks, not of what is attended to.

    units: that were compared. mean_absolute, greatest: difference of scores. violations: units whose bound did not
    hold, for an index that promises one; `None` for one that does not.
    """

    units: int
    mean_absolute: float
    greatest: float
    violations: int | None = None

    def __post_init__(self) -> None:
        _require_not_negative(self)


@dataclass(frozen=True, slots=True)
class SupportLedger:
    """What leaving rows out cost, with payload and reduction exact.

    rows, visible: that entered, and that there are. omitted_mass: dense weight of those left out, from 0 to 1. error,
    dense_norm: length of the difference of the outputs, and of the dense output. recall: of as many rows of the highest
    dense weight, by position.
    """

    rows: int
    visible: int
    omitted_mass: float
    error: float
    dense_norm: float
    recall: float

    def __post_init__(self) -> None:
        _require_not_negative(self)
        for field in ("omitted_mass", "recall"):
            if getattr(self, field) > 1:
                raise _invalid(f"SupportLedger.{field}", getattr(self, field), "at most 1")


@dataclass(frozen=True, slots=True)
class PayloadError:
    """How far the rows that entered are from those that the model computed: 0 unless a codec, or a turn to another
    position, changed them.

    rows: that were compared. key_greatest, value_greatest: absolute difference of an element. codec: in words.
    """

    rows: int
    key_greatest: float
    value_greatest: float
    codec: str = "raw"

    def __post_init__(self) -> None:
        _require_not_negative(self)

    @property
    def lossless(self) -> bool:
        """Whether every element is the model's."""
        return self.key_greatest == 0 == self.value_greatest


@dataclass(frozen=True, slots=True)
class ReductionError:
    """How far the merged answer is from one reduction over the same rows with the same weights.

    partials: states that were merged. greatest: absolute difference of an element of the output. tolerance: what was
    declared. answer: ESTIMATOR where rows were weighed by inverse inclusion probabilities, whose variance is another
    matter than rounding.
    """

    partials: int
    greatest: float
    tolerance: float
    answer: AnswerClass = AnswerClass.APPROXIMATE

    def __post_init__(self) -> None:
        _require_not_negative(self)

    @property
    def within(self) -> bool:
        """Whether the difference is within what was declared."""
        return self.greatest <= self.tolerance


@dataclass(frozen=True, slots=True)
class ErrorLedgers:
    """The four of one layer in one step; `None` where nothing was measured."""

    representation: RepresentationError | None = None
    support: SupportLedger | None = None
    payload: PayloadError | None = None
    reduction: ReductionError | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, `None` for what was not measured."""
        return {
            field.name: None if getattr(self, field.name) is None else dataclasses.asdict(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }


def _require_not_negative(record: Any) -> None:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            raise _invalid(f"{type(record).__name__}.{field.name}", value, "finite and at least 0")


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be {wanted}, got {value!r}")
