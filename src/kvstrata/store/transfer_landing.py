"""From a copier's acknowledgement to rows that every waiter may publish."""

from __future__ import annotations

from typing import Protocol

from kvstrata.contract.states import TransferState, WaiterState
from kvstrata.errors import Reason, StateError, StoreError
from kvstrata.store.destinations import Destination
from kvstrata.store.transfer_book import TransferBook
from kvstrata.store.transfer_records import CopyEvent, CopyOrder, TransferOutcome
from kvstrata.store.transfer_state import Transfer, Waiter

__all__ = ["Copier", "Landing", "interrupted", "verdict"]


_CHANGED_HANDS = (TransferOutcome.RECYCLED_DESTINATION, TransferOutcome.IDENTITY_MISMATCH)


class Copier(Protocol):
    """What moves the bytes. May be slow, and may hang; the queue never waits for it longer than a waiter's deadline."""

    def read(self, order: CopyOrder) -> CopyEvent:
        """Fill the destination, verify, acknowledge. Errors: `StoreError`; either way it has let go of the bytes."""
        ...

    def duplicate(self, source: Destination, target: Destination) -> None:
        """Copy what `read` brought to `source` to another waiter's destination."""
        ...


class Landing:
    """What happens to one transfer after its copy, for a `TransferQueue`."""

    def __init__(self, book: TransferBook, copier: Copier) -> None:
        self._book = book
        self._copier = copier

    def land(self, transfer: Transfer) -> None:
        """From the acknowledgement to VALIDATED, FAILED or RELEASED. May be repeated after an interruption."""
        outcome, error = verdict(transfer)
        with self._book.lock:
            self._book.close(transfer)
            if transfer.state is TransferState.COPYING:
                transfer.move(TransferState.COPIED)
            elif transfer.state is TransferState.FAILED and outcome is TransferOutcome.READY:
                outcome = TransferOutcome.FAILED  # its fan-out was interrupted
            waiting = [waiter for waiter in transfer.waiters if waiter.state is WaiterState.WAITING]
        found, outcome = outcome, TransferOutcome.FAILED
        try:
            if found is TransferOutcome.READY and transfer.state is TransferState.COPIED:
                self._fan_out(transfer, waiting)
            outcome = found
        except Exception as broken:
            transfer.raised = broken
            raise
        finally:
            # Not READY unless every destination was filled, also when it was Ctrl-C that stopped the filling.
            with self._book.lock:
                self._book.settle(transfer, outcome, error)
                self._book.changed.notify_all()
        for waiter in waiting:
            if waiter.then is not None:
                waiter.then(waiter)

    def _fan_out(self, transfer: Transfer, waiting: list[Waiter]) -> None:
        assert transfer.primary is not None
        for waiter in waiting:
            if waiter is transfer.primary or waiter.state is not WaiterState.WAITING:
                continue
            found, source = waiter.destination.check(), transfer.primary.destination
            if found is TransferOutcome.READY:
                self._copier.duplicate(source, waiter.destination)
                # Asked after the copy: what lay in a slot that changed hands before or during it is anybody's.
                found = source.check()
                if found not in _CHANGED_HANDS:
                    self._book.counts["coalesced_bytes"] += transfer.nbytes
                    continue
            with self._book.lock:
                if waiter.state is WaiterState.WAITING:
                    self._book.end(waiter, found)

    def publish(self, waiter: Waiter, transfer: Transfer) -> None:
        """On the waiter's thread, under the lock: compare once more, make it readable, end the waiter."""
        outcome, error = waiter.destination.check(), None
        if outcome is TransferOutcome.READY:
            try:
                waiter.destination.publish()
            except StateError as refused:
                outcome, error = TransferOutcome.FAILED, StoreError(refused.reason, refused.cause)
            else:
                if transfer.state is TransferState.VALIDATED:
                    transfer.move(TransferState.PUBLISHED)
        self._book.end(waiter, outcome, error)


def interrupted(transfer: Transfer) -> CopyEvent:
    """The acknowledgement of a copy that ended without one of its own."""
    error = StoreError(Reason.STORE_IO, "the copy was interrupted", "try again; nothing of it was published")
    return CopyEvent(transfer.generation, 0, transfer.unit.layout, transfer.unit.codec, error=error)


_FOUND_BELOW = {
    Reason.CHUNK_TRUNCATED: TransferOutcome.SHORT_COPY,
    Reason.CHUNK_DAMAGED: TransferOutcome.CHECKSUM_MISMATCH,
}


def verdict(transfer: Transfer) -> tuple[TransferOutcome, StoreError | None]:
    """What the copier's acknowledgement says about the bytes: READY, or why they must not be used."""
    event = transfer.event
    assert event is not None
    if event.error is not None:
        return _FOUND_BELOW.get(event.error.reason, TransferOutcome.FAILED), event.error
    if event.layout != transfer.unit.layout or event.codec != transfer.unit.codec:
        return TransferOutcome.LAYOUT_MISMATCH, None
    if event.bytes_completed != transfer.nbytes:
        return TransferOutcome.SHORT_COPY, None
    return (TransferOutcome.READY if event.checksum_ok else TransferOutcome.CHECKSUM_MISMATCH), None
