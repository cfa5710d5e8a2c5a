"""Whether a request may start: credits, queue entries, and a deadline that can be met."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstrata.contract.states import TransferState
from kvstrata.cost.credits import Credit, Credits, estimate
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.store.destinations import Destination
from kvstrata.store.transfer_book import TransferBook
from kvstrata.store.transfer_records import Refusal, UnitKey
from kvstrata.store.transfer_state import Transfer, Waiter

if TYPE_CHECKING:
    from kvstrata.store.transfers import TransferQueue

__all__ = ["Admission"]


class Admission:
    """Admits requests to a `TransferQueue`, under its lock."""

    def __init__(self, queue: TransferQueue, book: TransferBook) -> None:
        self._queue = queue
        self._book = book
        self._generation = 0

    @property
    def issued(self) -> int:
        """The latest transfer generation; the first is 1."""
        return self._generation

    def admit(
        self,
        unit: UnitKey,
        nbytes: int,
        destination: Destination,
        deadline: float,
        cross_numa: bool,
        then: Callable[[Waiter], None] | None,
    ) -> Waiter | Refusal | Credit:
        """One more waiter, or why there will be none, or the credit that is short now. Errors: `ConfigurationError`."""
        book, now = self._book, self._queue.clock()
        book.expire(now)
        transfer = book.open.get(unit)
        if transfer is not None and transfer.nbytes != nbytes:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"nbytes={nbytes}: the same unit is under way with {transfer.nbytes} bytes"
            )
        refusal = self._hopeless(transfer, nbytes, deadline - now, cross_numa)
        if refusal is not None:
            book.counts["refused"] += 1
            return refusal
        waiter = Waiter(self._queue, destination, deadline, then)
        own = (waiter, Credits(staging=destination.nbytes, queue=1))
        first = transfer is None
        if transfer is None:
            self._generation += 1
            transfer = Transfer(book, self._generation, unit, nbytes, now)
            taken = self._book.pool.reserve(own, (transfer, Credits(pinned=nbytes, link=nbytes)))
        else:
            taken = self._book.pool.reserve(own)
        if isinstance(taken, Credit):
            return taken
        waiter.credits = taken[0]
        waiter.transfer = transfer
        # Known to the book first: a waiter that only the transfer knew would keep it wanted for ever.
        book.waiters[waiter] = None
        transfer.waiters.append(waiter)
        book.counts["requests"] += 1
        book.counts["requested_bytes"] += nbytes
        if first:
            transfer.credits = taken[1]
            book.transfers[transfer.generation] = transfer
            book.counts["transfers"] += 1
            transfer.move(TransferState.RESERVED)
            book.open[unit] = transfer
            book.queue.append(transfer)
            self._book.changed.notify_all()
        return waiter

    def _hopeless(self, joined: Transfer | None, nbytes: int, left: float, cross_numa: bool) -> Refusal | None:
        if self._queue.closed:
            return Refusal(Reason.CLOSED, f"the queue {self._queue.direction} is closed")
        needed = 0.0
        rate = self._queue.rate() if joined is None and left < math.inf else None
        if rate is not None:
            ahead = sum(each.nbytes for each in self._book.transfers.values() if not each.landed)
            queued = ahead / (rate.bytes_per_s * max(1, self._queue.workers))
            needed = estimate(rate, nbytes, queued, cross_numa=cross_numa)
        if left > needed:
            return None
        return Refusal(
            Reason.DEADLINE,
            f"{nbytes} bytes {self._queue.direction} need about {needed:.6f} s, and {left:.6f} s are left",
        )

    def refuse(self, credit: Credit, nbytes: int, staging: int, waited: float) -> Refusal:
        """The refusal for credits that did not come in time."""
        with self._book.lock:
            self._book.counts["refused"] += 1
        free, total = self._book.pool.free, self._book.pool.total
        detail = f"{self._queue.direction}: {nbytes} bytes, {staging} staged, lack {credit}; free {free} of {total}"
        reason = Reason.QUEUE_FULL if credit is Credit.QUEUE else Reason.CREDIT_PRESSURE
        return Refusal(reason, detail, credit, waited)
