"""First in, first out: what came first leaves first, however often it was used.

A use costs nothing, so it suits entries that are all used once or all used alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic

from kvstrata.store.eviction.interface import Key, Usage, Victims, choose_victims
from kvstrata.store.eviction.membership import require_absent, require_empty, require_present, require_size

__all__ = ["Fifo", "FifoConfig"]


@dataclass(frozen=True, slots=True)
class FifoConfig:
    """Nothing to set."""


class Fifo(Generic[Key]):
    """See `EvictionPolicy`. `restore` orders by `created`. All calls are O(1)."""

    def __init__(self, config: FifoConfig | None = None) -> None:
        self.config = config or FifoConfig()
        # A plain dictionary walks over the gaps of what was removed from its front, which is where everything leaves.
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
        for usage in sorted(usages, key=lambda usage: usage.created):
            self.admit(usage.key, usage.nbytes, usage.created)

    def touch(self, key: Key, now: float) -> None:
        require_present(key, self._sizes)

    def remove(self, key: Key) -> None:
        require_present(key, self._sizes)
        del self._sizes[key]

    def victims(self, *, count: int = 0, nbytes: int = 0, pinned: Callable[[Key], bool] | None = None) -> Victims[Key]:
        return choose_victims(iter(self._sizes.items()), count, nbytes, pinned)
