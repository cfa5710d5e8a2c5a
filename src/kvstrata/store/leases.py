"""Bounded rights to read: a lease has an owner and an end, and what it pins goes when the last reader has left.

A lookup that is never followed by a read must not pin memory for ever, and a read under way must never find another's
rows in its slot. So expiry revokes the right at once, and the slots are given back when the last reader under the lease
has acknowledged: at once where nobody is reading.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Hashable, Iterator, Sequence

from kvstrata.contract.states import LEASE, LeaseState
from kvstrata.errors import ConfigurationError, Reason, StateError
from kvstrata.ports import Clock
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["Lease", "LeaseTable"]


class Lease:
    """A right to read some slots until a moment. Made by `LeaseTable.grant`.

    number: the lease's generation; never used twice. owner: who asked. key: what it is for. expires: by the table's
    clock, in seconds. state: whether it still counts. readers: reads under way.
    """

    __slots__ = ("_held", "expires", "key", "number", "owner", "readers", "state")

    def __init__(
        self, number: int, owner: str, key: Hashable, expires: float, held: Sequence[tuple[MemoryArena, Grant]]
    ) -> None:
        self.number = number
        self.owner = owner
        self.key = key
        self.expires = expires
        self.state = LeaseState.GRANTED
        self.readers = 0
        self._held = list(held)

    @property
    def grants(self) -> tuple[Grant, ...]:
        """The slots that stay in place."""
        return tuple(grant for _, grant in self._held)

    def give_back(self) -> None:
        """Let go of the slots; for the table alone."""
        while self._held:
            arena, grant = self._held.pop()
            arena.let_go(grant)


class LeaseTable:
    """Leases of one process. Thread-safe; no call blocks. clock: seconds; every use of a lease checks its end."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        owner: str,
        key: Hashable,
        slots: Sequence[tuple[MemoryArena, Grant]],
        seconds: float,
        slot_owner: Hashable | None = None,
    ) -> Lease:
        """Pin `slots` for `owner` for `seconds`. slot_owner: whose slots they must be, `key` unless given.

        Errors: `ConfigurationError` unless seconds are positive; `StateError` when a slot has changed hands, with
        nothing pinned.
        """
        if not seconds > 0:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"seconds={seconds} of a lease must be positive")
        held: list[tuple[MemoryArena, Grant]] = []
        with self._lock:
            try:
                for arena, grant in slots:
                    arena.hold(grant, key if slot_owner is None else slot_owner)
                    held.append((arena, grant))
            except BaseException:
                for arena, grant in held:
                    arena.let_go(grant)
                raise
            lease = Lease(next(self._numbers), owner, key, self._clock() + seconds, held)
            self._leases[lease.number] = lease
            return lease

    @contextlib.contextmanager
    def reading(self, lease: Lease) -> Iterator[None]:
        """Read under the lease. What the body has read may be used only if the block ends without an error.

        Errors: `StateError` with LEASE_EXPIRED when the lease ended before the block was entered or while it ran.
        """
        with self._lock:
            self._require(lease)
            lease.readers += 1
        try:
            yield
        finally:
            with self._lock:
                lease.readers -= 1
                self._expire_if_due(lease)
                ended = lease.state is not LeaseState.GRANTED
                if ended and not lease.readers:
                    self._acknowledge(lease)
        if ended:
            raise self._expired(lease)

    def renew(self, lease: Lease, seconds: float) -> None:
        """Let a lease that still counts end `seconds` from now. Errors: `StateError` with LEASE_EXPIRED."""
        with self._lock:
            self._require(lease)
            lease.expires = self._clock() + seconds

    def release(self, lease: Lease) -> None:
        """Give a lease up; its slots stay until its last reader has left. May be repeated."""
        with self._lock:
            if lease.state is LeaseState.GRANTED and lease.readers:
                lease.state = LEASE.require(lease.state, LeaseState.REVOKED)
            elif not lease.readers:
                self._acknowledge(lease)

    def revoke(self, owner: str) -> int:
        """Revoke all leases of `owner`, e.g. of a request that was cancelled; returns how many."""
        with self._lock:
            mine = [lease for lease in self._leases.values() if lease.owner == owner]
            for lease in mine:
                self.release(lease)
            return len(mine)

    def expire(self) -> list[Lease]:
        """Revoke what is past its end, and return it. What has no reader gives its slots back now."""
        with self._lock:
            live = [lease for lease in self._leases.values() if lease.state is LeaseState.GRANTED]
            for lease in live:
                self._expire_if_due(lease)
            return [lease for lease in live if lease.state is not LeaseState.GRANTED]

    def _require(self, lease: Lease) -> None:
        self._expire_if_due(lease)
        if lease.state is not LeaseState.GRANTED:
            raise self._expired(lease)

    def _expire_if_due(self, lease: Lease) -> None:
        if lease.state is LeaseState.GRANTED and self._clock() >= lease.expires:
            lease.state = LEASE.require(lease.state, LeaseState.REVOKED)
            if not lease.readers:
                self._acknowledge(lease)

    def _acknowledge(self, lease: Lease) -> None:
        if lease.state is LeaseState.ACKNOWLEDGED:
            return
        lease.state = LEASE.require(lease.state, LeaseState.ACKNOWLEDGED)
        self._leases.pop(lease.number, None)
        lease.give_back()

    def _expired(self, lease: Lease) -> StateError:
        return StateError(
            Reason.LEASE_EXPIRED,
            f"lease {lease.number} of {lease.owner} ended before its rows were read",
            "look the rows up again; a reader that needs longer asks for a longer lease, or renews it",
        )
