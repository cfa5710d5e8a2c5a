"""Keys in the order of a rank that changes with their uses: a heap whose outdated entries are dropped when met."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Generic, NamedTuple

from kvstrata.store.eviction.interface import Key

__all__ = ["Ranked", "Ranking"]


class Ranked(NamedTuple):
    """nbytes: size. serial: which of the ranks that the key has had is its present one."""

    nbytes: int
    serial: int


class Ranking(Generic[Key]):
    """Lowest rank first; of equal ranks the one that was given first. O(log n) for each change, on average.

    A change leaves the old entry in the heap, where its serial gives it away; once more than half of the heap is
    outdated it is built anew, which costs O(1) for each change.
    """

    def __init__(self) -> None:
        self.entries: dict[Key, Ranked] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def put(self, key: Key, nbytes: int, rank: float) -> None:
        """Give `key` a rank, its first or another."""
        self._serial += 1
        self.entries[key] = Ranked(nbytes, self._serial)
        heapq.heappush(self._heap, (rank, self._serial, key))
        self._trim()

    def remove(self, key: Key) -> None:
        """Forget `key`."""
        del self.entries[key]
        self._trim()

    def rerank(self, change: Callable[[Key], float]) -> None:
        """Give every key another rank; of equal ones the order stays. O(n)."""
        self._heap = [(change(key), entry.serial, key) for key, entry in self.entries.items()]
        heapq.heapify(self._heap)

    def ascending(self) -> Generator[tuple[Key, int], None, None]:
        """(key, bytes) from the lowest rank on; exhaust or close it before the next change."""
        met: list[tuple[float, int, Key]] = []
        try:
            while self._heap:
                item = heapq.heappop(self._heap)
                entry = self.entries.get(item[2])
                if entry is not None and entry.serial == item[1]:
                    met.append(item)
                    yield item[2], entry.nbytes
        finally:
            # What was met is in order, so a list that was emptied is a heap again as it stands.
            if self._heap:
                for item in met:
                    heapq.heappush(self._heap, item)
            else:
                self._heap = met

    def _trim(self) -> None:
        if len(self._heap) > 2 * len(self.entries) + 64:
            self._heap = [item for item in self._heap if self._current(item)]
            heapq.heapify(self._heap)

    def _current(self, item: tuple[float, int, Key]) -> bool:
        entry = self.entries.get(item[2])
        return entry is not None and entry.serial == item[1]
