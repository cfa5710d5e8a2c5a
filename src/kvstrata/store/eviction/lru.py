"""Least recently used: what was not asked for longest leaves first.

Right for conversations that return soon or never; a long scan of new keys pushes everything else out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic

from kvstrata.store.eviction.interface import Key, Usage, Victims, choose_victims
from kvstrata.store.eviction.membership import require_absent, require_empty, require_present, require_size

__all__ = ["Lru", "LruConfig"]


@dataclass(frozen=True, slots=True)
class LruConfig:
    """Nothing to set."""


class Lru(Generic[Key]):
    """See `EvictionPolicy`. Calls come in the order of time; `restore` orders by `last_used`. All calls are O(1)."""

    def __init__(self, config: LruConfig | None = None) -> None:
        self.config = config or LruConfig()
        self._sizes: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def admit(self, key: Key, nbytes: int, now: float, saving_s: float = 1.0) -> None:
        require_absent(key, self._sizes)
        self._sizes[key] = require_size(nbytes)

    def restore(self, usages: Iterable[Usage[Key]]) -> None:
        require_empty(self._sizes)
        for usage in sorted(usages, key=lambda usage: usage.last_used):
            self.admit(usage.key, usage.nbytes, usage.last_used)

    def touch(self, key: Key, now: float) -> None:
        require_present(key, self._sizes)
        self._sizes.move_to_end(key)

    def remove(self, key: Key) -> None:
        require_present(key, self._sizes)
        del self._sizes[key]

    def victims(self, *, count: int = 0, nbytes: int = 0, pinned: Callable[[Key], bool] | None = None) -> Victims[Key]:
        return choose_victims(iter(self._sizes.items()), count, nbytes, pinned)
