"""Least frequently used, with counters that age: what was used least of late leaves first.

Without ageing, what was popular once stays for ever. Here all counters are halved, rounded down, after every
`halve_every` uses of any key (as in Einziger, Friedman and Manes 2017, TinyLFU, ACM Transactions on Storage 13(4)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Generic

from kvstrata.cost.bounds import require_finite
from kvstrata.store.eviction.interface import Key, Usage, Victims, choose_victims
from kvstrata.store.eviction.membership import require_absent, require_empty, require_present, require_size
from kvstrata.store.eviction.ranking import Ranking

__all__ = ["Lfu", "LfuConfig"]


@dataclass(frozen=True, slots=True)
class LfuConfig:
    """halve_every: uses, of all keys together, after which all counters are halved; about ten for each entry that fits.

    Errors: `ConfigurationError` unless it is positive.
    """

    halve_every: int = 100_000

    def __post_init__(self) -> None:
        require_finite("LfuConfig.halve_every", self.halve_every, least=1)


class Lfu(Generic[Key]):
    """See `EvictionPolicy`. Of equal counters the key whose latest use is older goes first. Halving is O(n)."""

    def __init__(self, config: LfuConfig | None = None) -> None:
        self.config = config or LfuConfig()
        self._ranking: Ranking[Key] = Ranking()
        self._uses: dict[Key, int] = {}
        self._since_halving = 0

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def admit(self, key: Key, nbytes: int, now: float, saving_s: float = 1.0) -> None:
        require_absent(key, self._uses)
        self._count(key, require_size(nbytes), 1)

    def restore(self, usages: Iterable[Usage[Key]]) -> None:
        require_empty(self._uses)
        for usage in sorted(usages, key=lambda usage: usage.last_used):
            require_absent(usage.key, self._uses)
            self._uses[usage.key] = usage.uses
            self._ranking.put(usage.key, usage.nbytes, usage.uses)

    def touch(self, key: Key, now: float) -> None:
        require_present(key, self._uses)
        self._count(key, self._ranking.entries[key].nbytes, self._uses[key] + 1)

    def remove(self, key: Key) -> None:
        require_present(key, self._uses)
        del self._uses[key]
        self._ranking.remove(key)

    def victims(self, *, count: int = 0, nbytes: int = 0, pinned: Callable[[Key], bool] | None = None) -> Victims[Key]:
        with closing(self._ranking.ascending()) as order:
            return choose_victims(order, count, nbytes, pinned)

    def _count(self, key: Key, nbytes: int, uses: int) -> None:
        self._uses[key] = uses
        self._ranking.put(key, nbytes, uses)
        self._since_halving += 1
        if self._since_halving >= self.config.halve_every:
            self._since_halving = 0
            self._uses = {each: number // 2 for each, number in self._uses.items()}
            self._ranking.rerank(self._uses.__getitem__)
