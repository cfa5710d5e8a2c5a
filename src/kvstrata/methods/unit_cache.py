"""Which units to keep at hand: a bounded set, two published policies, and what keeping them would have saved.

A hint for placement and its account. It holds no rows, and what is in it never changes what is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.interface import require_positive

__all__ = ["UnitCache", "UnitCacheOutcome", "UnitCachePolicy"]


class UnitCachePolicy(StrEnum):
    """Who leaves first. LRU: what was chosen longest ago. SCORE: the lowest sum of attention mass, in which everything
    before weighs `decay` at each step (Xiao et al. 2024, InfLLM, section 3). SCORE_RESET: as their code has it, where
    a unit that is chosen again begins at zero."""

    LRU = "lru"
    SCORE = "score"
    SCORE_RESET = "score_reset"


@dataclass(frozen=True, slots=True)
class UnitCacheOutcome:
    """One step's account, in units. passed: chosen, but there was no place; they count as misses too."""

    hits: int
    misses: int
    evicted: tuple[int, ...]
    passed: int = 0


class UnitCache:
    """At most `capacity` units. decay: of the scores, from 0 to 1.

    Attributes: hits, misses, evictions: since the beginning, in units.
    """

    def __init__(self, capacity: int, policy: UnitCachePolicy = UnitCachePolicy.SCORE, decay: float = 0.1) -> None:
        require_positive("UnitCache.capacity", capacity)
        given: object = decay
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"UnitCache.decay must be from 0 to 1, got {decay!r}")
        self.capacity = capacity
        self.policy = policy
        self.decay = decay
        self.hits = self.misses = self.evictions = 0
        self._clock = 0
        self._worth: dict[int, float] = {}

    @property
    def resident(self) -> frozenset[int]:
        """Units worth keeping."""
        return frozenset(self._worth)

    def worth(self, unit: int) -> float:
        """What a resident unit is kept for: time of last use, or score. Errors: `KeyError`."""
        return self._worth[unit]

    def take(self, units: Sequence[int], mass: Sequence[float] | None = None) -> UnitCacheOutcome:
        """A step has chosen `units`, best first, each once; `mass` is the attention mass that each got (zero unless
        given). Units that were not chosen leave first, the least worth before others, of equals the lower; what was
        chosen beyond the capacity is passed over."""
        wanted = list(units)[: self.capacity]
        new = [unit for unit in wanted if unit not in self._worth]
        hits = sum(unit in self._worth for unit in units)
        over = len(self._worth) + len(new) - self.capacity
        others = sorted((worth, unit) for unit, worth in self._worth.items() if unit not in set(wanted))
        evicted = tuple(unit for _, unit in others[: max(0, over)])
        for unit in evicted:
            del self._worth[unit]
        self._note(wanted, [0.0] * len(wanted) if mass is None else list(mass)[: len(wanted)])
        self.hits += hits
        self.misses += len(units) - hits
        self.evictions += len(evicted)
        return UnitCacheOutcome(hits, len(units) - hits, evicted, len(units) - len(wanted))

    def forget(self, first: int) -> None:
        """Units from `first` on are there no more."""
        self._worth = {unit: worth for unit, worth in self._worth.items() if unit < first}

    def _note(self, units: list[int], mass: list[float]) -> None:
        if self.policy is UnitCachePolicy.LRU:
            self._clock += 1
            self._worth.update(dict.fromkeys(units, float(self._clock)))
            return
        if self.policy is UnitCachePolicy.SCORE_RESET:
            self._worth.update(dict.fromkeys(units, 0.0))
        for unit in self._worth:
            self._worth[unit] *= self.decay
        for unit, got in zip(units, mass, strict=True):
            self._worth[unit] = self._worth.get(unit, 0.0) + (got if math.isfinite(got) else 0.0)
