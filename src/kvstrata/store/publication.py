"""Sealed chunks go to the file tier behind the running model.

One thread, started and stopped by its owner, or none and the owner's `run_one`. The queue needs no bound of its own: a
chunk that waits occupies its slots, and the memory budget stops the producer. The thread writes small chunks that wait
together, so that they share their transactions.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.service_rates import Direction, ServiceObservation
from kvstrata.errors import KvstrataError, Reason, StoreError
from kvstrata.ports import Clock
from kvstrata.store.buffers import used_pages
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.service_ledger import ServiceLedger
from kvstrata.store.uses import ChunksInUse
from kvstrata.tiers.files import WriteReceipt
from kvstrata.tiers.interface import BatchTier, ChunkTier
from kvstrata.tiers.journal import WriteOutcome
from kvstrata.tiers.memory import Grant

__all__ = ["PublicationTotals", "Publisher"]


Job = tuple[ChunkRecord, list[Grant]]

_TOGETHER_BYTES = 8 << 20
"""Of chunks that are written together: who waits for the first of them waits for all."""
_TOGETHER_CHUNKS = 16


@dataclass(frozen=True)
class PublicationTotals:
    """What publishing has cost so far.

    written_bytes, present_bytes: rows new to the tier, and found there already. metadata_bytes: headers and padding.
    service_s: wall time at work. checksum_s (reading back included), write_s: parts of it. cpu_s: processor time of
    the thread. failures: chunks that could not be written.
    """

    chunks: int = 0
    written_bytes: int = 0
    present_bytes: int = 0
    service_s: float = 0.0
    checksum_s: float = 0.0
    write_s: float = 0.0
    cpu_s: float = 0.0
    metadata_bytes: int = 0
    failures: int = 0


class Publisher:
    """Writes sealed chunks in the order they were submitted.

    in_use: where what was written is held from eviction. rates: where the time that it took is noted.
    """

    def __init__(
        self,
        directory: Directory,
        tier: ChunkTier,
        layout: SegmentLayout,
        clock: Clock = time.perf_counter,
        in_use: ChunksInUse | None = None,
        rates: ServiceLedger | None = None,
    ) -> None:
        self.directory = directory
        self.tier = tier
        self.layout = layout
        self.totals = PublicationTotals()
        self._clock = clock
        self._in_use = in_use
        self._rates = rates
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._settled = threading.Condition()
        self._pending: set[ChunkRecord] = set()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvstrata-publish", daemon=True)
        self._thread.start()

    def submit(self, record: ChunkRecord) -> None:
        """Queue a sealed chunk. Its slots stay in place until the write is acknowledged. Does not block."""
        if record.file in (FileReplicaState.WRITING, FileReplicaState.PUBLISHED):
            return
        if record.resident != self.directory.layers:
            raise StoreError(Reason.CHUNK_MISSING, "only a chunk that is whole in memory can be published")
        self.directory.mark(record, FileReplicaState.WRITING)
        held = self.directory.hold(record)
        with self._settled:
            self._pending.add(record)
        self._jobs.put((record, held))

    @property
    def pending(self) -> int:
        """Chunks queued or being written."""
        return len(self._pending)

    def wait(self, record: ChunkRecord | None = None) -> float:
        """Block until `record` (or everything queued) is settled, written or failed; return the seconds waited."""
        start = self._clock()
        with self._settled:
            while self._pending if record is None else record in self._pending:
                self._settled.wait(timeout=1.0)
                if self._error is not None or self._thread is None or not self._thread.is_alive():
                    break
        if self._error is not None:
            raise self._error
        return self._clock() - start

    def stop(self) -> None:
        """Finish what is queued, then end the thread. Blocks; interrupted, it leaves only whole files behind."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def run_one(self) -> bool:
        """Write the next queued chunk on this thread; whether there was one. For an owner that starts no thread."""
        if self._jobs.empty():
            return False
        job = self._jobs.get()
        if job is not None:
            self._settle([job])
        return job is not None

    def _run(self) -> None:
        following = [self._jobs.get()]
        while (job := following.pop()) is not None:
            self._settle(self._together(job, following))
            if not following:
                following.append(self._jobs.get())

    def _together(self, first: Job, following: list[Job | None]) -> list[Job]:
        """`first` and what waits behind it and is written along. What was taken and is not goes to `following`."""
        jobs, size = [first], self.directory.arena.slot_bytes * self.directory.layers
        names = {first[0].digest}
        while isinstance(self.tier, BatchTier) and len(jobs) < min(_TOGETHER_CHUNKS, _TOGETHER_BYTES // size):
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None or job[0].digest in names:
                following.append(job)
                break
            jobs.append(job)
            names.add(job[0].digest)
        return jobs

    def _settle(self, jobs: list[Job]) -> None:
        start, cpu = self._clock(), time.thread_time()
        state, failure = FileReplicaState.FAILED, None
        try:
            self._write(jobs)
            state = FileReplicaState.PUBLISHED
        except KvstrataError as error:
            if len(jobs) > 1:
                # What fails for one of them, or for want of room for all, need not fail for each.
                for job in jobs:
                    self._settle([job])
                return
            failure = error if isinstance(error, StoreError) else StoreError(error.reason, error.cause)
        except BaseException as error:  # noqa: BLE001 - kept for the owner: a bug must not look like a full disk
            self._error = error
        for record, held in jobs:
            # The slots are let go before the chunk becomes evictable: an eviction must free them at once.
            for grant in held:
                self.directory.arena.let_go(grant)
            self.directory.mark(record, state, failure)
        cpu = time.thread_time() - cpu
        self._add(failures=int(failure is not None), service_s=self._clock() - start, cpu_s=cpu)
        with self._settled:
            self._pending.difference_update(record for record, _ in jobs)
            self._settled.notify_all()

    def _write(self, jobs: list[Job]) -> None:
        chunks = [(record.identity, self.layout, self._segments(record, held)) for record, held in jobs]
        if len(chunks) > 1 and isinstance(self.tier, BatchTier):
            receipts = self.tier.write_all(chunks)
        else:
            receipts = [self.tier.write(*chunk) for chunk in chunks]
        new = [record for record, _ in jobs if not record.leased]
        if self._in_use is not None and new:
            missing = self._in_use.hold([record.digest for record in new])
            for record in new:
                record.leased = record.digest not in missing
            if missing:
                raise StoreError(Reason.CHUNK_MISSING, "the chunk was removed as soon as it was written", "save again")
        for receipt in receipts:
            self._count(receipt)

    def _segments(self, record: ChunkRecord, held: list[Grant]) -> list[list[memoryview]]:
        backing, tokens = self.directory.arena.backing, len(record.identity.token_ids)
        return [used_pages(backing.readable(grant.slot), self.layout, tokens) for grant in held]

    def _count(self, receipt: WriteReceipt) -> None:
        written = receipt.outcome is not WriteOutcome.ALREADY_PRESENT
        seconds = receipt.checksum_seconds + receipt.write_seconds + receipt.validate_seconds
        if self._rates is not None and written and seconds > 0:
            tier = self.tier.capability.tier
            self._rates.record(ServiceObservation(tier, Direction.WRITE, receipt.payload_bytes, seconds))
        self._add(
            chunks=1,
            written_bytes=receipt.payload_bytes if written else 0,
            metadata_bytes=receipt.bytes - receipt.payload_bytes if written else 0,
            present_bytes=0 if written else receipt.payload_bytes,
            checksum_s=receipt.checksum_seconds + receipt.validate_seconds,
            write_s=receipt.write_seconds,
        )

    def _add(self, **amounts: float) -> None:
        values = {name: getattr(self.totals, name) + amount for name, amount in amounts.items()}
        self.totals = PublicationTotals(**{**self.totals.__dict__, **values})
