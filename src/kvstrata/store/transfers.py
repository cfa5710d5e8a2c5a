"""A bounded queue of transfers from one tier to another: admit, copy, validate, publish, release.

    submit      takes credits and a reserved destination, or refuses with a reason; joins a read of the same unit
    start       hands the next read to a copier                        -> CopyOrder
    complete    takes the copier's acknowledgement                     <- CopyEvent
    finish      compares slots and generations, publishes on the waiter's own thread

Worker threads (`TransferWorkers`) or a caller that calls `run_one`, or `start` and `complete` with a clock of its own,
drive the same code. Source: hierarchical K/V memory, sections 0x02A, 0x04B-0x04D, 0x08H-0x08L.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from kvstrata.contract.states import TransferState, WaiterState
from kvstrata.cost.credits import Credit, Credits, PathRate, shortage
from kvstrata.errors import Reason, StateError, StoreError
from kvstrata.ports import Clock
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.destinations import Destination
from kvstrata.store.transfer_admission import Admission
from kvstrata.store.transfer_book import TransferBook
from kvstrata.store.transfer_landing import Copier, Landing, interrupted
from kvstrata.store.transfer_records import (
    Acknowledgement,
    CopyEvent,
    CopyOrder,
    DirectionTotals,
    Refusal,
    TransferOutcome,
    TransferResult,
    UnitKey,
)
from kvstrata.store.transfer_state import Transfer, Waiter

__all__ = ["Copier", "TransferQueue"]

_LOOK_S = 0.05
_CUT_SHORT = frozenset({TransferState.COPYING, TransferState.COPIED, TransferState.CANCELLED, TransferState.FAILED})


class TransferQueue:
    """Transfers of one direction, e.g. `files -> device`. Thread-safe.

    pool: its credits; the queue holds as many requests as the pool has queue entries. copier: see `Copier`. rate: tells
    the rate of one worker on the path, as measured; while it tells none no deadline is refused ahead of time. clock:
    for deadlines and receipts. deliver: how a copier's acknowledgement reaches `complete`, for injecting faults.
    """

    def __init__(
        self,
        direction: str,
        pool: CreditPool,
        copier: Copier,
        *,
        rate: Callable[[], PathRate | None] = lambda: None,
        clock: Clock = time.perf_counter,
        deliver: Callable[[Callable[[CopyEvent], Acknowledgement], CopyEvent], object] | None = None,
    ) -> None:
        self.direction = direction
        self.pool = pool
        self.copier = copier
        self.rate = rate
        self.clock = clock
        self.workers = 0
        self.closed = False
        self.book = TransferBook(pool)
        self.lock = self.book.lock
        self.changed = self.book.changed
        self._admission = Admission(self, self.book)
        self._landing = Landing(self.book, copier)
        self._deliver = deliver

    @property
    def totals(self) -> DirectionTotals:
        """What was done so far."""
        with self.lock:
            book = self.book
            return replace(
                DirectionTotals(**dict(book.counts)),
                queue_s=book.queue_s,
                service_s=book.service_s,
                waited_s=book.waited_s,
            )

    @property
    def pending(self) -> int:
        """Transfers admitted and not acknowledged."""
        return len(self.book.transfers)

    @property
    def runnable(self) -> bool:
        """Whether `start` may find something."""
        return bool(self.book.queue)

    @property
    def busy(self) -> bool:
        """Whether anything is queued or being copied, so that credits may come back without anybody's `finish`."""
        return bool(self.book.queue or self.book.copying)

    def submit(
        self,
        unit: UnitKey,
        nbytes: int,
        destination: Destination,
        *,
        deadline: float = math.inf,
        wait_s: float = 0.0,
        while_busy: bool = False,
        cross_numa: bool = False,
        then: Callable[[Waiter], None] | None = None,
    ) -> Waiter | Refusal:
        """Admit one request, or join the read of the same `unit` (`nbytes` of payload) that is queued or under way.

        Blocks for credits at most `wait_s` by the queue's clock; by default it does not block. while_busy: nor when
        nothing is being copied, for a caller that holds what has landed himself. On a refusal the destination stays
        the caller's. Errors: `ConfigurationError` when the unit is under way with another size.
        """
        began, waiting = self.clock(), False
        while True:
            seen = self.pool.releases
            with self.lock:
                answer = self._admission.admit(unit, nbytes, destination, deadline, cross_numa, then)
            if not isinstance(answer, Credit):
                return answer
            waited = self.clock() - began
            needed = Credits(nbytes, destination.nbytes, nbytes, 1)
            idle = while_busy and not self.busy and self.pool.releases == seen
            if idle or shortage(self.pool.total, needed) or waited >= wait_s:
                return self._admission.refuse(answer, nbytes, destination.nbytes, waited)
            with self.lock:
                self.book.counts["waited"] += not waiting
            waiting = True
            # By the queue's clock, which may not be the system's: it is looked at again every now and then.
            released = self.pool.wait(seen, min(wait_s - waited, _LOOK_S))
            until_now = self.clock() - began
            with self.lock:
                self.book.waited_s += until_now - waited
            if not released and until_now >= wait_s:
                return self._admission.refuse(answer, nbytes, destination.nbytes, until_now)

    def start(self, *, thread: int | None = None) -> CopyOrder | None:
        """Take the next read, or `None` when nothing is to be done. Whoever takes it must `complete` it once.

        thread: the one that copies before it does anything else, so that `reclaim` on it knows that the copy has ended.
        """
        with self.lock:
            book, now = self.book, self.clock()
            book.expire(now)
            while book.queue:
                transfer = book.queue.popleft()
                if transfer.state is not TransferState.RESERVED or not self._choose_primary(transfer):
                    continue
                transfer.thread = thread
                transfer.busy = True
                transfer.started_at = now
                book.copying[transfer.generation] = transfer
                transfer.move(TransferState.COPYING)
                book.queue_s += now - transfer.admitted_at
                assert transfer.primary is not None
                return CopyOrder(transfer.generation, transfer.unit, transfer.nbytes, transfer.primary.destination)
            return None

    def complete(self, event: CopyEvent) -> Acknowledgement:
        """Take a copier's acknowledgement: verify, fan out, free what the copier held. Never publishes.

        Told apart by generation, in whatever order they come; one that was acknowledged before changes nothing.
        """
        with self.lock:
            transfer = self.book.copying.get(event.generation)
            if transfer is None or transfer.event is not None:
                waiting = transfer is None and any(each.generation == event.generation for each in self.book.queue)
                if waiting or not 0 < event.generation <= self._admission.issued:
                    return Acknowledgement.UNKNOWN
                self.book.counts["duplicates"] += 1
                return Acknowledgement.DUPLICATE
            self.book.expire(self.clock())
            stale = transfer.dead
            transfer.event = event
            transfer.service_s = self.clock() - transfer.started_at
            self.book.service_s += transfer.service_s
            self.book.counts["moved_bytes"] += event.bytes_completed
            self.book.counts["stale"] += stale
        self._landing.land(transfer)
        return Acknowledgement.STALE if stale else Acknowledgement.ACCEPTED

    def run_one(self) -> bool:
        """Start, copy and complete one transfer on this thread; whether there was one. Blocks as long as the copier.

        Whatever the copier raises beside `StoreError` ends the transfer for all its waiters, then passes through.
        """
        order = self.start(thread=threading.get_ident())
        if order is None:
            return False
        try:
            event = self.copier.read(order)
        except StoreError as error:
            event = CopyEvent(order.generation, 0, order.unit.layout, order.unit.codec, error=error)
        except BaseException as error:
            self._broke(order.generation, error)
            raise
        if self._deliver is None:
            self.complete(event)
        else:
            self._deliver(self.complete, event)
        return True

    def poll(self, waiter: Waiter) -> TransferResult | None:
        """See `Waiter.poll`."""
        with self.lock:
            transfer = waiter.transfer
            assert transfer is not None
            if waiter.result is None:
                if transfer.landed:
                    self._landing.publish(waiter, transfer)
                else:
                    self.book.expire(self.clock())
            result = waiter.result
            if result is not None and result.outcome is TransferOutcome.FAILED and transfer.raised is not None:
                raise transfer.raised
            return result

    def finish(self, waiter: Waiter) -> TransferResult:
        """See `Waiter.finish`. Without worker threads it copies itself, whatever is queued before included."""
        while (result := self.poll(waiter)) is None:
            if not self.workers:
                if not self.run_one():
                    raise StateError(Reason.NOT_COMMITTED, f"nobody copies {self.direction}: the waiter would wait on")
                continue
            with self.lock:
                transfer = waiter.transfer
                if waiter.result is None and transfer is not None and not transfer.landed:
                    left = waiter.deadline - self.clock()
                    self.changed.wait(None if left == math.inf else max(0.0, left))
        return result

    def cancel(self, waiter: Waiter) -> None:
        """See `Waiter.cancel`."""
        with self.lock:
            if waiter.state is WaiterState.WAITING:
                self.book.end(waiter, TransferOutcome.CANCELLED)
                self.changed.notify_all()

    def holds(self, waiter: Waiter) -> bool:
        """Whether the waiter's destination or credits are still out."""
        return waiter in self.book.waiters

    def expire(self) -> int:
        """End the waiting of everybody whose deadline is over; returns how many. Also done by `poll` and `start`."""
        with self.lock:
            late = self.book.expire(self.clock())
            if late:
                self.changed.notify_all()
            return late

    def reset(self) -> None:
        """Cancel everything. Acknowledgements of what was under way are STALE, and free its slots and credits."""
        with self.lock:
            for waiter in list(self.book.waiters):
                if waiter.state is WaiterState.WAITING:
                    self.book.end(waiter, TransferOutcome.CANCELLED)
            self.changed.notify_all()

    def reclaim(self, wanted: Collection[Waiter]) -> list[Destination]:
        """After an interruption: cancel whom nobody waits for, and finish what was cut short. Does not block.

        wanted: waiters that somebody will finish or cancel. Returns the destinations that are still out, because they
        are wanted or because a copier has not acknowledged.
        """
        with self.lock:
            for waiter in list(self.book.waiters):
                if waiter.state is WaiterState.WAITING and waiter not in wanted:
                    if waiter.transfer is None:
                        self.book.waiters.pop(waiter, None)
                    else:
                        self.book.end(waiter, TransferOutcome.CANCELLED)
            here = threading.get_ident()
            cut_short = [
                transfer
                for transfer in self.book.transfers.values()
                if transfer.state in _CUT_SHORT and (transfer.event is not None or transfer.thread == here)
            ]
        for transfer in cut_short:
            if transfer.event is None:
                transfer.event = interrupted(transfer)
            self._landing.land(transfer)
        with self.lock:
            self.book.reclaim()
            self.changed.notify_all()
            return [waiter.destination for waiter in self.book.waiters]

    def close(self) -> None:
        """Admit nothing more and cancel what waits. What is being copied is released when it is acknowledged."""
        with self.lock:
            self.closed = True
        self.reset()

    def _choose_primary(self, transfer: Transfer) -> bool:
        for waiter in list(transfer.waiters):
            if waiter.state is not WaiterState.WAITING:
                continue
            found = waiter.destination.check()
            if found is TransferOutcome.READY:
                transfer.primary = waiter
                return True
            self.book.end(waiter, found)
        return False

    def _broke(self, generation: int, error: BaseException) -> None:
        """The copier raised what no copier should, or was interrupted: no row of it is used."""
        transfer = self.book.copying.get(generation)
        if transfer is not None:
            # An interrupt is this thread's alone; a fault of the copier is to be seen by everybody who waits.
            transfer.raised = error if isinstance(error, Exception) else None
            self.complete(interrupted(transfer))
