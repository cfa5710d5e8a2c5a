"""Look-ups in flight: each holds a search lease on one index generation until its rows are gathered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator

from kvstrata.contract.states import LeaseState
from kvstrata.errors import Reason, StateError
from kvstrata.store.leases import Lease, LeaseTable
from kvstrata.store.retrieval.snapshots import ReclaimOutcome

__all__ = ["Searches"]


class Searches:
    """Search leases by number. Thread-safe; no call blocks. leases: their table. seconds: how long one lasts."""

    def __init__(self, leases: LeaseTable, seconds: float) -> None:
        self._leases = leases
        self._seconds = seconds
        self._held: dict[int, tuple[Lease, int]] = {}
        self._lock = threading.Lock()

    def begin(self, owner: str, index_generation: int) -> int:
        """Take a lease on a generation; returns the number of the look-up."""
        lease = self._leases.grant(owner, ("index", index_generation), (), self._seconds)
        with self._lock:
            self._held[lease.number] = (lease, index_generation)
        return lease.number

    @contextlib.contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Read under the look-up's lease. Errors: `StateError` with LEASE_EXPIRED when it has ended, also meanwhile."""
        held = self._held.get(number)
        if held is None:
            raise StateError(
                Reason.LEASE_EXPIRED, f"look-up {number} is not in flight: it was finished", "look the rows up again"
            )
        with self._leases.reading(held[0]):
            yield

    def finish(self, number: int) -> None:
        """Give the lease up. May be repeated."""
        with self._lock:
            held = self._held.pop(number, None)
        if held is not None:
            self._leases.release(held[0])

    def open(self) -> frozenset[int]:
        """Numbers of all look-ups that may still read."""
        self._leases.expire()
        with self._lock:
            ended = [n for n, (lease, _) in self._held.items() if lease.state is LeaseState.ACKNOWLEDGED]
            for number in ended:
                del self._held[number]
            return frozenset(self._held)

    def obstacle(self, numbers: Collection[int]) -> ReclaimOutcome | None:
        """What these look-ups still keep from being reclaimed."""
        live = self.open() & frozenset(numbers)
        with self._lock:
            states = {self._held[number][0].state for number in live if number in self._held}
        if LeaseState.GRANTED in states:
            return ReclaimOutcome.LOOKUP_IN_FLIGHT
        return ReclaimOutcome.READER_LEFT if LeaseState.REVOKED in states else None

    def of_index(self, generation: int) -> frozenset[int]:
        """Look-ups that refer to an index generation."""
        live = self.open()
        with self._lock:
            return frozenset(n for n, (_, index) in self._held.items() if n in live and index == generation)
