"""Rows on their way out: unreachable first, then their readers leave, then their storage is reclaimed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.contract.manifest import DeletionReceipt
from kvstrata.store.retrieval.searches import Searches
from kvstrata.store.retrieval.snapshots import ReclaimOutcome

__all__ = ["Withdrawal", "Withdrawals"]


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Positions [start, stop) of one history that no look-up names any more. lookups: those that began before."""

    cache_generation: int
    start: int
    stop: int
    lookups: frozenset[int]


class Withdrawals:
    """Tombstones over index entries. Thread-safe; no call blocks but for the deletion."""

    def __init__(self, searches: Searches) -> None:
        self._searches = searches
        self._hidden: set[tuple[int, int, int]] = set()
        self._lock = threading.Lock()

    def withdraw(self, cache_generation: int, start: int, stop: int) -> Withdrawal:
        """Hide the positions from every look-up that ends from now on."""
        with self._lock:
            self._hidden.add((cache_generation, start, stop))
        # Asked after the tombstone is visible: a look-up that is missing here has seen it.
        return Withdrawal(cache_generation, start, stop, self._searches.open())

    def hides(self, cache_generation: int, position: int) -> bool:
        """Whether `position` of that history is on its way out."""
        return any(cache == cache_generation and start <= position < stop for cache, start, stop in self._hidden)

    def reclaim(self, withdrawal: Withdrawal, delete: Callable[[], DeletionReceipt]) -> ReclaimOutcome:
        """Give the rows' storage back, once every look-up that may have named them has ended.

        delete: releases the rows where they lie, and says whether that is durable; called only when nobody reads.
        """
        obstacle = self._searches.obstacle(withdrawal.lookups)
        if obstacle is not None:
            return obstacle
        return ReclaimOutcome.RECLAIMED if delete().durable else ReclaimOutcome.DELETION_NOT_DURABLE
