"""How much of a history a method may let into attention, for each K/V head of a layer, persistent rows counted in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction as Ratio

from kvstrata.errors import ConfigurationError, Reason

__all__ = ["CapFallback", "EstimatedMass", "Fraction", "Persistent", "Rows", "SelectionBudget", "Threshold"]


class CapFallback(StrEnum):
    """What becomes of a selection that would pass its cap: TRUNCATE keeps the best, EXACT reads everything, REFUSE
    raises before anything is published."""

    TRUNCATE = "truncate"
    EXACT = "exact"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Rows:
    """At most `rows` rows."""

    rows: int

    def __post_init__(self) -> None:
        _require_count("Rows.rows", self.rows)

    def limit(self, visible: int) -> int:
        """Rows out of `visible`; never more than there are."""
        return min(self.rows, visible)


@dataclass(frozen=True, slots=True)
class Fraction:
    """At most this share of the visible rows, and never fewer than `least`."""

    fraction: float
    least: int = 1

    def __post_init__(self) -> None:
        _require_share("Fraction.fraction", self.fraction)
        _require_count("Fraction.least", self.least)

    def limit(self, visible: int) -> int:
        """Rows out of `visible`, rounded down. The fraction is taken as it is written: 0.29 of 100 are 29."""
        return min(visible, max(self.least, math.floor(Ratio(str(float(self.fraction))) * visible)))


@dataclass(frozen=True, slots=True)
class Threshold:
    """Every unit whose estimated score lies at most `margin` below the best one, as far as `cap` rows go."""

    margin: float
    cap: int
    on_cap: CapFallback = CapFallback.TRUNCATE

    def __post_init__(self) -> None:
        if not (_is_number(self.margin) and math.isfinite(self.margin) and self.margin >= 0):
            raise _invalid("Threshold.margin", self.margin, "a finite number of at least 0")
        _require_count("Threshold.cap", self.cap)
        _require_fallback("Threshold.on_cap", self.on_cap)

    def limit(self, visible: int) -> int:
        """Rows out of `visible` that the cap allows."""
        return min(self.cap, visible)


@dataclass(frozen=True, slots=True)
class EstimatedMass:
    """The best units that together reach this share of the *estimated* attention mass, as far as `cap` rows go.

    The share is one of the mass of all units that can be chosen; what persistent rows hold comes on top. The estimate
    is the method's own: the mass that is kept may be another one.
    """

    mass: float
    cap: int
    on_cap: CapFallback = CapFallback.TRUNCATE

    def __post_init__(self) -> None:
        _require_share("EstimatedMass.mass", self.mass)
        _require_count("EstimatedMass.cap", self.cap)
        _require_fallback("EstimatedMass.on_cap", self.on_cap)

    def limit(self, visible: int) -> int:
        """Rows out of `visible` that the cap allows."""
        return min(self.cap, visible)


SelectionBudget = Rows | Fraction | Threshold | EstimatedMass


@dataclass(frozen=True, slots=True)
class Persistent:
    """Rows that always enter attention: the first `sinks` and the last `recent`, the newest row included."""

    sinks: int = 4
    recent: int = 64

    def __post_init__(self) -> None:
        if not _is_whole(self.sinks) or self.sinks < 0:
            raise _invalid("Persistent.sinks", self.sinks, "a whole number of at least 0")
        _require_count("Persistent.recent", self.recent)

    @property
    def rows(self) -> int:
        """Both together."""
        return self.sinks + self.recent

    def bounds(self, visible: int) -> tuple[int, int]:
        """(end of the sinks, start of the recent rows) in a history of `visible` rows; the two never cross."""
        recent = max(0, visible - self.recent)
        return min(self.sinks, recent), recent


def _require_count(field: str, value: int) -> None:
    if not _is_whole(value) or value < 1:
        raise _invalid(field, value, "a whole number of at least 1")


def _require_share(field: str, value: float) -> None:
    if not (_is_number(value) and 0 < value <= 1):
        raise _invalid(field, value, "more than 0 and at most 1")


def _require_fallback(field: str, value: object) -> None:
    if not isinstance(value, CapFallback):
        raise _invalid(field, value, f"one of {', '.join(f'CapFallback.{member.name}' for member in CapFallback)}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be {wanted}, got {value!r}")
