"""Credits in use: taken whole or not at all, and given back exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.cost.credits import Credit, Credits, shortage
from kvstrata.errors import Reason, StateError

__all__ = ["CreditPool", "Reservation"]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Credits that `owner` holds. `serial` tells it apart from every other one of its pool."""

    serial: int
    amount: Credits
    owner: object


class CreditPool:
    """The credits of one path. Thread-safe. Several queues may draw on one pool, e.g. on the same pinned memory.

    total: what there is. outstanding: reservations that were not released yet; empty when nothing is on its way.
    """

    def __init__(self, total: Credits) -> None:
        self.total = total
        self._free = total
        self._serial = 0
        self._held: dict[int, Reservation] = {}
        self._releases = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def free(self) -> Credits:
        """Total less what is reserved."""
        return self._free

    @property
    def reserved(self) -> Credits:
        """Everything that is out now."""
        return self.total - self._free

    @property
    def releases(self) -> int:
        """Counts releases; `wait` takes the number seen before a refusal, so that no release is missed."""
        return self._releases

    @property
    def outstanding(self) -> tuple[Reservation, ...]:
        """Reservations not released yet, oldest first."""
        with self._lock:
            return tuple(self._held.values())

    def reserve(self, *wanted: tuple[object, Credits]) -> tuple[Reservation, ...] | Credit:
        """One reservation for every (owner, amount), or nothing and the resource that is short. Does not block."""
        amount = wanted[0][1]
        for _, each in wanted[1:]:
            amount += each
        with self._lock:
            short = shortage(self._free, amount)
            if short is not None:
                return short
            taken = tuple(Reservation(self._serial + i, each, owner) for i, (owner, each) in enumerate(wanted))
            free = self._free - amount
            # An interrupt between these lines leaves a pool that `reclaim` puts right.
            self._serial += len(taken)
            self._held.update({each.serial: each for each in taken})
            self._free = free
            return taken

    def release(self, reservation: Reservation) -> None:
        """Give the credits back. Errors: `StateError` when they were given back before, or are another pool's."""
        if not self.give_back(reservation):
            raise StateError(
                Reason.NOT_COMMITTED, f"reservation {reservation.serial} was released before; credits return once"
            )

    def give_back(self, reservation: Reservation) -> bool:
        """As `release`, for a caller that may have been interrupted after it; whether they were still out."""
        with self._lock:
            if self._held.get(reservation.serial) is not reservation:
                return False
            free = self._free + reservation.amount
            del self._held[reservation.serial]
            self._free = free
            self._releases += 1
            self._changed.notify_all()
            return True

    def wait(self, seen: int, seconds: float) -> bool:
        """Block until something is released after the `seen`-th release, or `seconds` have passed; whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: self._releases != seen, max(0.0, seconds))

    def reclaim(self, orphaned: Callable[[object], bool]) -> int:
        """Release what `orphaned(owner)` says nobody will, and count the free credits anew; returns how many.

        For after an interruption, which may come between the taking of credits and the noting of it.
        """
        with self._changed:
            lost = [each for each in self._held.values() if orphaned(each.owner)]
            for each in lost:
                del self._held[each.serial]
            self._free = self.total - _total([each.amount for each in self._held.values()])
            self._releases += 1
            self._changed.notify_all()
            return len(lost)


def _total(amounts: Sequence[Credits]) -> Credits:
    return Credits(
        sum(each.pinned for each in amounts),
        sum(each.staging for each in amounts),
        sum(each.link for each in amounts),
        sum(each.queue for each in amounts),
    )
