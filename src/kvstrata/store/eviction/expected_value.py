"""Expected value: what saves least for each byte leaves first.

A chunk that is stored already has cost its write, and a byte costs the same whoever has it. What is left of
V(c, j) = p_c [T_recompute - T_promote] - C_capacity - C_write (`cost/retention.py`) is the expected saving per byte,

    density = rate * saving_s / bytes,    rate = w ln(2) / half-life,

with w the count of uses, each of which weighs half after every half-life. The rate stands for p_c: it orders keys
alike while p_c is small, and tells them apart where p_c is close to 1. All rates fall by the same factor, so the order
changes with uses only, and log2(density) + now / half-life is a rank that need not be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Generic

from kvstrata.cost.bounds import require_finite
from kvstrata.cost.retention import ReuseModel
from kvstrata.store.eviction.interface import Key, Usage, Victims, choose_victims
from kvstrata.store.eviction.membership import require_absent, require_empty, require_present, require_size
from kvstrata.store.eviction.ranking import Ranking

__all__ = ["ExpectedValue", "ExpectedValueConfig"]


@dataclass(frozen=True, slots=True)
class ExpectedValueConfig:
    """reuse: how fast uses lose weight."""

    reuse: ReuseModel = field(default_factory=ReuseModel)


class ExpectedValue(Generic[Key]):
    """See `EvictionPolicy`. Keys that save nothing leave first, of these the one whose latest use is the oldest."""

    def __init__(self, config: ExpectedValueConfig | None = None) -> None:
        self.config = config or ExpectedValueConfig()
        self._ranking: Ranking[Key] = Ranking()
        # Decayed count, when it had that value, and seconds that a use saves.
        self._weights: dict[Key, tuple[float, float, float]] = {}
        self._now = -math.inf

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, key: Key) -> bool:
        return key in self._weights

    def admit(self, key: Key, nbytes: int, now: float, saving_s: float = 1.0) -> None:
        require_absent(key, self._weights)
        require_finite("saving_s", saving_s, least=-math.inf)
        self._weigh(key, require_size(nbytes), 1.0, self._latest(now), saving_s)

    def restore(self, usages: Iterable[Usage[Key]]) -> None:
        require_empty(self._weights)
        for usage in sorted(usages, key=lambda usage: usage.last_used):
            require_absent(usage.key, self._weights)
            self._weigh(usage.key, usage.nbytes, usage.uses, self._latest(usage.last_used), usage.saving_s)

    def touch(self, key: Key, now: float) -> None:
        require_present(key, self._weights)
        weight, then, saving_s = self._weights[key]
        now = self._latest(now)
        weight = self.config.reuse.decayed(weight, now - then) + 1
        self._weigh(key, self._ranking.entries[key].nbytes, weight, now, saving_s)

    def remove(self, key: Key) -> None:
        require_present(key, self._weights)
        del self._weights[key]
        self._ranking.remove(key)

    def victims(self, *, count: int = 0, nbytes: int = 0, pinned: Callable[[Key], bool] | None = None) -> Victims[Key]:
        with closing(self._ranking.ascending()) as order:
            return choose_victims(order, count, nbytes, pinned)

    def _latest(self, now: float) -> float:
        self._now = max(self._now, now)
        return self._now

    def _weigh(self, key: Key, nbytes: int, weight: float, now: float, saving_s: float) -> None:
        self._weights[key] = (weight, now, saving_s)
        density = weight * saving_s / nbytes
        rank = math.log2(density) + now / self.config.reuse.half_life_s if density > 0 else -math.inf
        self._ranking.put(key, nbytes, rank)
