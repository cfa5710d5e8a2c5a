"""Segments come back from lower tiers into slots: reserve, copy, validate, and only then publish.

Reading happens on the threads of a transfer queue, which bounds what is on its way and shares equal reads; publishing
happens on the caller's thread, so that a kernel never meets a table entry whose bytes are still arriving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvstrata.contract.capability import DEVICE
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.states import ResidencyState, SlotState
from kvstrata.cost.credits import Credits, shortage
from kvstrata.cost.service_rates import Direction
from kvstrata.errors import DamagedError, Reason, StateError, StoreError
from kvstrata.ports import Clock
from kvstrata.store.buffers import used_pages
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.destinations import Destination, SlotDestination
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.host_cache import HostCache
from kvstrata.store.measured_rate import MeasuredRate
from kvstrata.store.open_chunks import OpenChunks
from kvstrata.store.segment_copier import SegmentCopier
from kvstrata.store.service_ledger import ServiceLedger
from kvstrata.store.transfer_records import (
    Acknowledgement,
    CopyEvent,
    CopyOrder,
    Refusal,
    SegmentSource,
    TransferOutcome,
    TransferResult,
    UnitKey,
)
from kvstrata.store.transfer_state import Waiter
from kvstrata.store.transfer_workers import TransferWorkers
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.chunk_format import payload_bytes
from kvstrata.tiers.interface import ChunkTier
from kvstrata.tiers.memory import Grant

__all__ = ["Arrival", "Batch", "OpenChunks", "Promoter", "Promotion"]

_QUEUE_ENTRIES = 256
_NEXT_STEPS = {
    Reason.CREDIT_PRESSURE: "try the step again, or pass more credits",
    Reason.QUEUE_FULL: "try the step again, or pass more credits",
    Reason.DEADLINE: "pass a longer read_timeout_s, or put the store on a faster disk",
}


@dataclass(frozen=True, slots=True)
class Promotion:
    """One segment on its way: its chunk, its layer, and the slot reserved for it."""

    record: ChunkRecord
    layer: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Arrival:
    """Bytes that a batch brought, those of them that came from the host tier, and seconds summed over readers."""

    nbytes: int
    host_bytes: int
    read_s: float


class _Slots(SlotDestination):
    """Slots of promotions. They go back through the directory, which knows that their segments are on their way."""

    __slots__ = ("_directory", "host_bytes", "items")

    def __init__(self, directory: Directory, items: Sequence[Promotion]) -> None:
        super().__init__(
            directory.arena,
            [item.grant for item in items],
            [(item.record.digest, item.layer) for item in items],
            publish_slot=self._publish_item,
        )
        self._directory = directory
        self.items = items
        self.host_bytes = 0

    def _publish_item(self, index: int) -> None:
        item = self.items[index]
        if item.record.grants[item.layer] == item.grant:
            return  # done before an interrupt
        self._directory.publish(item.record, item.layer, item.grant)

    def disown(self) -> None:
        """Nobody waits any more; the slots come back by `release`, when their reader has acknowledged."""
        for item in self.items:
            self._directory.disown(item.record, item.layer, item.grant)

    def release(self) -> None:
        for item, owner in zip(self.items, self.owners, strict=True):
            arena, grant = self.arena, item.grant
            if arena.belongs(grant, owner) and arena.state(grant.slot) is SlotState.RESERVED:
                self._directory.abandon(item.record, item.layer, grant)


class _Copier(SegmentCopier):
    """Asks the host tier first, then the files. rate: where the time of what came from files alone is noted."""

    def __init__(self, files: OpenChunks, host: HostCache | None, clock: Clock, rate: MeasuredRate | None) -> None:
        super().__init__(files)
        self._files = files
        self._host = host
        self._clock = clock
        self._rate = rate

    def read(self, order: CopyOrder) -> CopyEvent:
        slots, layout, nbytes = order.into, order.unit.layout, 0
        assert isinstance(slots, _Slots)
        backing, began = slots.arena.backing, self._clock()
        for item in slots.items:
            slot, tokens = item.grant.slot, len(item.record.identity.token_ids)
            buffers = used_pages(backing.writable(slot), layout, tokens)
            loaded = self._host.load(item.record, item.layer, buffers) if self._host is not None else None
            if loaded is None:
                loaded = self._read_file(item, layout, buffers)
            else:
                slots.host_bytes += loaded
            nbytes += loaded
            backing.flush(slot)
        if self._rate is not None and not slots.host_bytes:
            # Here and not when somebody takes the rows over: what comes too late is measured as well.
            self._rate.note(nbytes, self._clock() - began)
        return CopyEvent(order.generation, nbytes, layout)

    def _read_file(self, item: Promotion, layout: SegmentLayout, buffers: Sequence[memoryview]) -> int:
        record, name = item.record, item.record.digest
        if not record.valid(record.durable):
            raise DamagedError(
                Reason.CHUNK_MISSING, f"chunk {name.hex()[:16]} has no valid copy in files", chunk=name.hex()
            )
        file = self._files.check_out(name)
        try:
            if (file.layout is not layout and file.layout != layout) or file.layers != len(record.grants):
                raise DamagedError(
                    Reason.CHUNK_FOREIGN,
                    f"chunk {name.hex()[:16]} is stored in another layout: {file.layout}",
                    chunk=name.hex(),
                )
            nbytes = file.read_into(item.layer, buffers)
            if self._host is not None:
                self._host.stage(record, item.layer, buffers, file.checksum(item.layer))
            return nbytes
        finally:
            self._files.check_in(file)


class Batch:
    """Promotions issued together; `finish` waits for all of them and publishes what is whole.

    A reader that is late keeps its slots until it has acknowledged, however long that takes; nobody else gets them.
    """

    def __init__(self, queue: TransferQueue, items: Sequence[Promotion], timeout_s: float) -> None:
        self.items = items
        self.waiters: list[Waiter] = []
        self._queue = queue
        self._timeout_s = timeout_s

    @property
    def settled(self) -> bool:
        """Whether its slots are published or given back, so that no reader writes to them any more."""
        return not any(map(self._queue.holds, self.waiters))

    def finish(self) -> Arrival:
        """Wait, publish every segment, and tell what that cost. Blocks.

        Errors: `DamagedError` when a segment is missing, short or altered, `StoreError` when it could not be read or
        not in time, `StateError` when its slot changed hands. Parts that arrived whole stay published.
        """
        results = [waiter.finish() for waiter in self.waiters]
        for result in results:
            if not result.ready:
                raise self._error(result)
        receipts = [result.receipt for result in results]
        host = sum(waiter.destination.host_bytes for waiter in self.waiters if isinstance(waiter.destination, _Slots))
        read_s = sum(each.service_s for each in receipts)
        return Arrival(sum(each.requested_bytes for each in receipts), host, read_s)

    def abandon(self) -> None:
        """Give the slots back once the readers have acknowledged. Blocks for that, but not past the deadline: segments
        whose reader is later than that may be promoted anew, into other slots.

        Also after a `finish` that was interrupted; after one that ended there is nothing left to do.
        """
        for waiter in self.waiters:
            waiter.cancel()
        queue, end = self._queue, self._queue.clock() + self._timeout_s
        with queue.lock:
            while not self.settled and (left := end - queue.clock()) > 0:
                queue.changed.wait(left)
            for waiter in filter(queue.holds, self.waiters):
                assert isinstance(waiter.destination, _Slots)
                waiter.destination.disown()

    def _error(self, result: TransferResult) -> Exception:
        if result.error is not None:
            return result.error
        if result.outcome is TransferOutcome.LATE:
            return StoreError(
                Reason.STORE_LATE,
                f"the segments of a layer did not arrive within {self._timeout_s:g} s",
                "the rows are still there: try the step again, check the disk, or pass a longer read_timeout_s",
            )
        return StateError(
            Reason.NOT_COMMITTED, f"segments arrived in another generation than they were reserved in: {result.outcome}"
        )


class Promoter:
    """Reads segments with `readers` threads; with 0, whoever waits for a batch reads it. Owner calls `close`.

    timeout_s: longest time for a batch. host: a tier in between, which is asked first and keeps what passes through.
    credits: what may be on its way at once; by default as much as the arena holds. deliver: as for `TransferQueue`.
    rates: where the time of reads is noted; a read that at the measured rate cannot arrive in time is refused. source:
    name of the tier that is read.
    """

    def __init__(
        self,
        directory: Directory,
        tier: ChunkTier,
        layout: SegmentLayout,
        readers: int = 1,
        clock: Clock = time.perf_counter,
        timeout_s: float = 30.0,
        host: HostCache | None = None,
        credits: Credits | None = None,  # noqa: A002 - the word of the field
        rates: ServiceLedger | None = None,
        deliver: Callable[[Callable[[CopyEvent], Acknowledgement], CopyEvent], object] | None = None,
    ) -> None:
        self.directory = directory
        self.layout = layout
        self.files = OpenChunks(tier)
        self.readers = readers
        self._timeout_s = timeout_s
        self.source = tier.capability.tier
        rate = None if rates is None else MeasuredRate(rates, self.source, Direction.READ, clock)
        arena = directory.arena.slots * directory.arena.slot_bytes
        self.pool = CreditPool(credits or Credits(arena, arena, arena, _QUEUE_ENTRIES))
        self.queue = TransferQueue(
            f"{self.source} -> {DEVICE}",
            self.pool,
            _Copier(self.files, host, clock, rate),
            rate=rate or (lambda: None),
            clock=clock,
            deliver=deliver,
        )
        self._workers = TransferWorkers(self.queue, readers) if readers else None
        if self._workers is not None:
            self._workers.start()

    def reserve(self, segments: Sequence[tuple[ChunkRecord, int]]) -> list[Promotion] | None:
        """Slots for all the segments, or `None` and nothing reserved when there are not enough."""
        if self.directory.arena.free_slots < len(segments):
            return None
        promotions: list[Promotion] = []
        for record, layer in segments:
            grant = self.directory.reserve(record, layer)
            if grant is None:
                for promotion in promotions:
                    self.directory.abandon(promotion.record, promotion.layer, promotion.grant)
                return None
            promotions.append(Promotion(record, layer, grant))
        return promotions

    def affords(self, segments: Sequence[tuple[ChunkRecord, int]]) -> bool:
        """Whether the credits for reading all of `segments` are free now, none of them being read already."""
        nbytes = sum(self._length(record) for record, _ in segments)
        staging = len(segments) * self.directory.arena.slot_bytes
        entries = min(len(segments), max(1, self.readers))
        return shortage(self.pool.free, Credits(nbytes, staging, nbytes, entries)) is None

    def start(self, promotions: Sequence[Promotion]) -> Batch:
        """Begin reading into the reserved slots. Blocks while credits are short and readers are about to give some
        back, but not past the deadline of the read, which begins now.

        Errors: `StoreError` with CREDIT_PRESSURE, QUEUE_FULL, DEADLINE or CLOSED when the queue does not take them;
        their slots are given back then.
        """
        batch = Batch(self.queue, promotions, self._timeout_s)
        share = max(1, -(-len(promotions) // max(1, self.readers)))
        deadline = self.queue.clock() + self._timeout_s
        for start in range(0, len(promotions), share):
            items = promotions[start : start + share]
            for item in items:
                self.directory.advance(item.record, item.layer, ResidencyState.COPY_IN)
            answer = self.queue.submit(
                self._unit(items),
                self._bytes(items),
                _Slots(self.directory, items),
                deadline=deadline,
                wait_s=deadline - self.queue.clock() if self.readers else 0.0,
                while_busy=True,
            )
            if isinstance(answer, Refusal):
                for item in promotions[start:]:
                    self.directory.abandon(item.record, item.layer, item.grant)
                batch.abandon()
                raise StoreError(answer.reason, answer.detail, _NEXT_STEPS.get(answer.reason, "open the memory again"))
            batch.waiters.append(answer)
        return batch

    def reclaim(self, wanted: Collection[Batch]) -> set[Grant]:
        """Cancel reads that nobody waits for, and return the grants into which readers may still write.

        wanted: batches that somebody will finish or abandon. Does not block.
        """
        waiters = {waiter for batch in wanted for waiter in batch.waiters}
        out: list[Destination] = self.queue.reclaim(waiters)
        awaited = {id(waiter.destination) for waiter in waiters}
        for each in out:
            if isinstance(each, _Slots) and id(each) not in awaited:
                each.disown()
        return {grant for each in out if isinstance(each, _Slots) for grant in each.grants}

    def close(self) -> None:
        """Wait for reads under way, but not past their deadline, end the threads, close the files."""
        self.queue.close()
        if self._workers is not None:
            self._workers.stop(self._timeout_s)
        self.files.close()

    def _unit(self, items: Sequence[Promotion]) -> UnitKey:
        context = items[0].record.identity.context
        segments = tuple(
            [SegmentSource(r.digest, i.layer, r.durable.generation, r.epoch) for i in items for r in (i.record,)]
        )
        return UnitKey(context.namespace, context.digest, segments, self.layout, self.source)

    def _bytes(self, items: Sequence[Promotion]) -> int:
        return sum([self._length(item.record) for item in items])

    def _length(self, record: ChunkRecord) -> int:
        tokens = len(record.identity.token_ids)
        whole = tokens == self.layout.chunk_tokens
        return self.layout.segment_bytes if whole else payload_bytes(self.layout, tokens)
