"""Who waits for what, and the giving back: every step may be interrupted and repeated, and gives back once.

Used by `TransferQueue` alone, under its lock. A waiter's state is set before anything is given back, and a transfer's
acknowledgement is noted before it is acted on, so that `reclaim` can finish whatever an interrupt cut short.
"""

from __future__ import annotations

import threading
from collections import Counter, deque

from kvstrata.contract.states import WAITER, TransferState, WaiterState
from kvstrata.errors import StoreError
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.transfer_records import TransferOutcome, TransferResult, UnitKey
from kvstrata.store.transfer_state import Transfer, Waiter

__all__ = ["TransferBook"]

_ENDS = {
    TransferOutcome.READY: WaiterState.READY,
    TransferOutcome.CANCELLED: WaiterState.CANCELLED,
    TransferOutcome.LATE: WaiterState.LATE,
}


class TransferBook:
    """waiters: everybody whose destination or credits are still out. queue: transfers not started, in order; dead ones
    are left in it and skipped. open: units that others may join. copying: by generation, until acknowledged. lock: of
    all this. changed: tells sleepers to look again.
    """

    def __init__(self, pool: CreditPool) -> None:
        self.pool = pool
        self.waiters: dict[Waiter, None] = {}
        self.transfers: dict[int, Transfer] = {}
        self.queue: deque[Transfer] = deque()
        self.open: dict[UnitKey, Transfer] = {}
        self.copying: dict[int, Transfer] = {}
        self.counts: Counter[str] = Counter()
        self.queue_s = 0.0
        self.service_s = 0.0
        self.waited_s = 0.0
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)

    def end(self, waiter: Waiter, outcome: TransferOutcome, error: StoreError | None = None) -> None:
        """Give the waiter its result; what it holds is given back at once, or when the copier has acknowledged."""
        state = _ENDS.get(outcome, WaiterState.FAILED)
        result, state = TransferResult(outcome, waiter.receipt(), error), WAITER.require(waiter.state, state)
        # Signals are not served between these stores: a result without its state would hold its credits for ever.
        waiter.result, waiter.state = result, state
        self.counts[state] += 1
        transfer = waiter.transfer
        assert transfer is not None
        if not transfer.busy:
            self.let_go(waiter)
        self.settle_unwanted(transfer)
        self.changed.notify_all()

    def let_go(self, waiter: Waiter) -> None:
        """Give back destination and credits of a waiter that has ended and whose copier is done with it."""
        if waiter.state is not WaiterState.READY:
            waiter.destination.release()
        if waiter.credits is not None:
            self.pool.give_back(waiter.credits)
            waiter.credits = None
        self.waiters.pop(waiter, None)

    def settle_unwanted(self, transfer: Transfer) -> None:
        """A transfer that nobody waits for is dead; unless somebody still copies, it is over."""
        if transfer.wanted or transfer.state is TransferState.RELEASED:
            return
        self.close(transfer)
        if not transfer.dead and transfer.state is not TransferState.PUBLISHED:
            transfer.move(TransferState.CANCELLED)
        if not transfer.busy:
            self.release(transfer)

    def close(self, transfer: Transfer) -> None:
        """Let nobody join any more."""
        if self.open.get(transfer.unit) is transfer:
            del self.open[transfer.unit]

    def return_backend(self, transfer: Transfer) -> None:
        """The read is over, or never began: pinned memory and link are free."""
        if transfer.credits is not None:
            self.pool.give_back(transfer.credits)
            transfer.credits = None

    def release(self, transfer: Transfer) -> None:
        """The end: nobody waits and nobody copies."""
        self.return_backend(transfer)
        self.copying.pop(transfer.generation, None)
        if transfer.state is not TransferState.RELEASED:
            transfer.move(TransferState.RELEASED)
        self.transfers.pop(transfer.generation, None)

    def settle(self, transfer: Transfer, outcome: TransferOutcome, error: StoreError | None) -> None:
        """After the acknowledgement and the fan-out: free what the copier held, and tell the waiters what is known."""
        transfer.busy = False
        self.close(transfer)
        self.copying.pop(transfer.generation, None)
        self.return_backend(transfer)
        if transfer.state is TransferState.COPIED:
            transfer.move(TransferState.VALIDATED if outcome is TransferOutcome.READY else TransferState.FAILED)
        for waiter in list(transfer.waiters):
            if waiter.state is not WaiterState.WAITING:
                self.let_go(waiter)
            elif not transfer.landed:
                self.end(waiter, outcome, error)
        self.settle_unwanted(transfer)

    def expire(self, now: float) -> int:
        """Waiters whose deadline is over and whose bytes have not landed are LATE; returns how many."""
        late = [
            waiter
            for waiter in self.waiters
            if waiter.deadline <= now
            and waiter.state is WaiterState.WAITING
            and waiter.transfer is not None
            and not waiter.transfer.landed
        ]
        for waiter in late:
            self.end(waiter, TransferOutcome.LATE)
        return len(late)

    def reclaim(self) -> int:
        """Finish what an interrupt cut short; returns how many reservations nobody would have given back."""
        for waiter in list(self.waiters):
            transfer = waiter.transfer
            if transfer is None or waiter not in transfer.waiters:
                # Interrupted on its way in: its slots are the caller's, its credits go below.
                self.waiters.pop(waiter, None)
            elif waiter.state is not WaiterState.WAITING and not transfer.busy:
                self.let_go(waiter)
        for transfer in list(self.transfers.values()):
            if transfer.state is TransferState.RESERVED and transfer not in self.queue:
                self.queue.append(transfer)
            if transfer.state is TransferState.RELEASED:
                self.release(transfer)
            elif not transfer.busy:
                self.settle_unwanted(transfer)
        held = {id(owner) for owner in self.waiters} | {id(each) for each in self.transfers.values()}
        mine = (Waiter, Transfer)
        # A pool may serve several queues: only this queue's owners are judged here.
        return self.pool.reclaim(lambda owner: isinstance(owner, mine) and self.owns(owner) and id(owner) not in held)

    def owns(self, owner: object) -> bool:
        """Whether a waiter or transfer came through this book."""
        if isinstance(owner, Waiter):
            return owner.queue.book is self
        return isinstance(owner, Transfer) and owner.book is self
