"""Chunks that open requests of this process rely on: leased in the catalog, so that no process evicts them.

A lease costs a transaction, so that chunks are leased together and let go of together, and renewed when half of their
time is over. Where the process is killed they are void at once; where it forgets them, they expire.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from kvstrata.errors import Reason, StoreError
from kvstrata.store.admission import AdmissionFilter
from kvstrata.store.catalog import Catalog

__all__ = ["ChunksInUse"]

_SHARE_OF_LEASE = 60


class ChunksInUse:
    """Counted uses of chunks, over all attached models of a process. Thread-safe; `hold`, `renew` and `close` block.

    catalog: where they are leased; `None`, or one that is only read, leases nothing. admission: counts the uses.
    lease_s: how long, in seconds. now: seconds since 1970.
    """

    def __init__(
        self,
        catalog: Catalog | None,
        admission: AdmissionFilter | None = None,
        lease_s: float = 3600.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._admission = admission
        self._catalog = catalog if catalog is not None and catalog.process else None
        self._lease_s = lease_s
        self._now = now
        self._uses: Counter[bytes] = Counter()
        self._leased: set[bytes] = set()
        self._renew_at = math.inf
        self._lock = threading.Lock()

    def __contains__(self, chunk: object) -> bool:
        return self._uses[chunk] > 0 if isinstance(chunk, bytes) else False

    def hold(self, chunks: Iterable[bytes]) -> tuple[bytes, ...]:
        """Count a use of each and lease those that are not; returns what is not published, and is not held then.

        Errors: `StoreError`.
        """
        wanted = list(dict.fromkeys(chunks))
        with self._lock:
            missing = self._lease_or_go_on([chunk for chunk in wanted if chunk not in self._leased])
            for chunk in wanted:
                if self._admission is not None:
                    self._admission.record(chunk)
                if chunk not in missing:
                    self._uses[chunk] += 1
            if self._catalog is not None:
                self._catalog.touch(chunk for chunk in wanted if chunk not in missing)
            return tuple(chunk for chunk in wanted if chunk in missing)

    def drop(self, chunks: Iterable[bytes]) -> None:
        """One use less of each. The leases of those that have none left end with the next lease, renewal or `close`."""
        with self._lock:
            for chunk in chunks:
                if self._uses[chunk] > 0:
                    self._uses[chunk] -= 1

    def release(self, chunk: bytes) -> None:
        """As `drop`, for one chunk."""
        self.drop((chunk,))

    def renew(self) -> None:
        """Lease anew once half of the time is over; cheap before that. Errors: `StoreError`."""
        if self._now() < self._renew_at:
            return
        with self._lock:
            self._renew_at = self._now() + self._lease_s / 2
            if self._catalog is not None:
                # A chunk that is gone by now, evicted after its lease had ended, is met as a miss when it is read.
                self._lease_or_go_on([chunk for chunk, uses in self._uses.items() if uses > 0])

    def settle(self) -> None:
        """End the leases of what is used no more, now. Errors: `StoreError`."""
        with self._lock:
            self._lease([])

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._uses.clear()
            if self._catalog is not None and self._leased:
                self._catalog.unpin(self._catalog.process, list(self._leased))
            self._leased.clear()

    def _lease_or_go_on(self, chunks: list[bytes]) -> frozenset[bytes]:
        """As `_lease`. On a full disk the chunks are read without a lease, and leased when it has room again."""
        try:
            return self._lease(chunks)
        except StoreError as error:
            if error.reason is not Reason.STORE_FULL or self._catalog is None:
                raise
            self._renew_at = min(self._renew_at, self._now() + self._lease_s / _SHARE_OF_LEASE)
            return frozenset(chunk for chunk in chunks if not self._catalog.journal.published(chunk))

    def _lease(self, chunks: list[bytes]) -> frozenset[bytes]:
        catalog = self._catalog
        if catalog is None:
            return frozenset()
        idle = [chunk for chunk in self._leased if self._uses[chunk] <= 0 and chunk not in chunks]
        if idle:
            catalog.unpin(catalog.process, idle)
            self._leased.difference_update(idle)
            for chunk in idle:
                del self._uses[chunk]
        if not chunks:
            return frozenset()
        end = self._now() + self._lease_s
        self._renew_at = min(self._renew_at, end - self._lease_s / 2)
        missing: frozenset[bytes] = frozenset()
        # All or none is the catalog's rule: the others are leased without those that are gone, until none is.
        while chunks and (gone := frozenset(catalog.pin(catalog.process, chunks, end))):
            missing |= gone
            chunks = [chunk for chunk in chunks if chunk not in gone]
        self._leased.update(chunks)
        return missing
