"""How fast a tier is, as measured: seconds = fixed + bytes / rate, fitted to what transfers really took.

The fit is robust, pure and deterministic. The slope is the median of the slopes between all pairs of observations
(Theil 1950, Sen 1968), the fixed part the median of what remains: a stall now and then, up to about 29 % of the
observations, moves neither far. Where all observations have one size, or the slope is not positive, size and time say
nothing about the fixed part: it is 0, and the rate the median of bytes per second, which is right for transfers of that
size.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from types import MappingProxyType

from kvstrata.cost.bounds import require_finite

__all__ = ["Direction", "ServiceObservation", "ServiceRate", "ServiceRates", "fit_rate"]


class Direction(StrEnum):
    """READ: from the tier to the faster memory above it. WRITE: the other way."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class ServiceObservation:
    """One transfer that was completed: `nbytes` from or to `tier` in `seconds`, queueing left out.

    Errors: `ConfigurationError` unless both are finite and positive.
    """

    tier: str
    direction: Direction
    nbytes: int
    seconds: float

    def __post_init__(self) -> None:
        require_finite("ServiceObservation.nbytes", self.nbytes, above=True)
        require_finite("ServiceObservation.seconds", self.seconds, above=True)


@dataclass(frozen=True, slots=True)
class ServiceRate:
    """bytes_per_s, fixed_s: of one transfer. observations: how many it rests on.

    Errors: `ConfigurationError` unless the rate is positive and the rest is not negative.
    """

    bytes_per_s: float
    fixed_s: float
    observations: int

    def __post_init__(self) -> None:
        require_finite("ServiceRate.bytes_per_s", self.bytes_per_s, above=True)
        require_finite("ServiceRate.fixed_s", self.fixed_s)
        require_finite("ServiceRate.observations", self.observations)

    def seconds(self, nbytes: int, transfers: int = 1) -> float:
        """Service time of `nbytes` in `transfers` pieces, one after the other."""
        return nbytes / self.bytes_per_s + transfers * self.fixed_s


def fit_rate(samples: Sequence[tuple[int, float]]) -> ServiceRate:
    """Fit (bytes, seconds) pairs, at least one; quadratic in their number."""
    slopes = [
        (seconds_b - seconds_a) / (bytes_b - bytes_a)
        for (bytes_a, seconds_a), (bytes_b, seconds_b) in combinations(samples, 2)
        if bytes_a != bytes_b
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    fixed = statistics.median([seconds - slope * nbytes for nbytes, seconds in samples])
    if slope <= 0 or fixed < 0:
        return ServiceRate(statistics.median([nbytes / seconds for nbytes, seconds in samples]), 0.0, len(samples))
    return ServiceRate(1 / slope, fixed, len(samples))


@dataclass(frozen=True)
class ServiceRates:
    """Rates by tier and direction. A pair that was never observed is missing."""

    rates: Mapping[tuple[str, Direction], ServiceRate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", MappingProxyType(dict(self.rates)))

    @classmethod
    def fitted(cls, observations: Iterable[ServiceObservation], window: int = 64) -> ServiceRates:
        """Fit the latest `window` observations of each tier and direction; later ones come later in `observations`.

        Errors: `ConfigurationError` unless `window` is positive.
        """
        require_finite("window", window, least=1)
        samples: dict[tuple[str, Direction], list[tuple[int, float]]] = {}
        for one in observations:
            samples.setdefault((one.tier, one.direction), []).append((one.nbytes, one.seconds))
        return cls({place: fit_rate(pairs[-window:]) for place, pairs in samples.items()})

    def get(self, tier: str, direction: Direction, least_observations: int = 1) -> ServiceRate | None:
        """The rate, or `None` while it rests on fewer than `least_observations`."""
        rate = self.rates.get((tier, direction))
        return rate if rate is not None and rate.observations >= least_observations else None
