"""The live objects behind a transfer: one backend read, and everybody who waits for it.

Both belong to the queue that made them; their fields change only under its lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstrata.contract.states import TRANSFER, TransferState, WaiterState
from kvstrata.store.credit_pool import Reservation
from kvstrata.store.destinations import Destination
from kvstrata.store.transfer_records import CopyEvent, TransferReceipt, TransferResult, UnitKey

if TYPE_CHECKING:
    from kvstrata.store.transfer_book import TransferBook
    from kvstrata.store.transfers import TransferQueue

__all__ = ["Transfer", "Waiter"]


class Transfer:
    """One read of one unit. generation: never used again, so that a completion cannot be taken for another's.

    busy: a copier may write to destinations, its own or those it fans out to. primary: whose destination it reads into.
    thread: the thread that copies within `run_one`, or `None`.
    """

    __slots__ = (
        "admitted_at",
        "book",
        "busy",
        "credits",
        "event",
        "generation",
        "nbytes",
        "primary",
        "raised",
        "service_s",
        "started_at",
        "state",
        "thread",
        "unit",
        "waiters",
    )

    def __init__(self, book: TransferBook, generation: int, unit: UnitKey, nbytes: int, now: float) -> None:
        self.book = book
        self.generation = generation
        self.unit = unit
        self.nbytes = nbytes
        self.state = TransferState.QUEUED
        self.waiters: list[Waiter] = []
        self.primary: Waiter | None = None
        self.credits: Reservation | None = None
        self.busy = False
        self.event: CopyEvent | None = None
        self.raised: BaseException | None = None
        self.thread: int | None = None
        self.admitted_at = now
        self.started_at = now
        self.service_s = 0.0

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return any(waiter.state is WaiterState.WAITING for waiter in self.waiters)

    @property
    def landed(self) -> bool:
        """Whether the bytes are at every waiter's destination, verified."""
        return self.state in (TransferState.VALIDATED, TransferState.PUBLISHED)

    @property
    def dead(self) -> bool:
        """Whether it will never be published, whatever its copier still does."""
        return self.state in (TransferState.CANCELLED, TransferState.FAILED, TransferState.RELEASED)

    def move(self, state: TransferState) -> None:
        """Errors: `StateError` for an illegal transition."""
        self.state = TRANSFER.require(self.state, state)


class Waiter:
    """One request's interest in a transfer. Its owner calls `finish` or `poll` until there is a result, or `cancel`.

    deadline: on the queue's clock. then: called once when the bytes have landed or never will, by whichever thread
    found out, without locks; for a next hop.
    """

    __slots__ = ("credits", "deadline", "destination", "queue", "result", "state", "then", "transfer")

    def __init__(
        self,
        queue: TransferQueue,
        destination: Destination,
        deadline: float,
        then: Callable[[Waiter], None] | None,
    ) -> None:
        self.queue = queue
        self.destination = destination
        self.deadline = deadline
        self.then = then
        self.state = WaiterState.WAITING
        self.result: TransferResult | None = None
        self.credits: Reservation | None = None
        self.transfer: Transfer | None = None

    @property
    def settled(self) -> bool:
        """Whether the destination was published or given back, and the credits with it."""
        return not self.queue.holds(self)

    def poll(self) -> TransferResult | None:
        """As `finish`, without blocking: `None` while the bytes are on their way and the deadline is not over."""
        return self.queue.poll(self)

    def finish(self) -> TransferResult:
        """Wait for the bytes until the deadline, compare slots and generations, publish on this thread. Blocks.

        What did not go well is an outcome, never an exception; the exception of a copier that broke passes through.
        """
        return self.queue.finish(self)

    def cancel(self) -> None:
        """Give up. Others keep their read; the last one to go lets it die. Idempotent; does not block."""
        self.queue.cancel(self)

    def receipt(self) -> TransferReceipt:
        """What it cost so far."""
        transfer = self.transfer
        assert transfer is not None
        nbytes, first = transfer.nbytes, transfer.primary is self
        moved = transfer.event.bytes_completed if transfer.event is not None else 0
        return TransferReceipt(
            self.queue.direction,
            transfer.generation,
            nbytes,
            moved if first else 0,
            0 if first or not transfer.landed else nbytes,
            transfer.started_at - transfer.admitted_at,
            transfer.service_s,
        )
