"""Sealed chunks go to the file tier behind the running model.

One thread, started and stopped by its owner, or none and the owner's `run_one`. The queue is bounded by credits of its
own (`publication_queue`); what gets none stays in memory and follows in order. The thread writes small chunks that are
queued together, so that they share their transactions.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, replace

from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.credits import Credits
from kvstrata.cost.service_rates import Direction, ServiceObservation
from kvstrata.errors import KvstrataError, Reason, StoreError
from kvstrata.ports import Clock
from kvstrata.store.buffers import used_pages
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.publication_queue import Job, PublicationQueue, Submission
from kvstrata.store.service_ledger import ServiceLedger
from kvstrata.store.uses import ChunksInUse
from kvstrata.tiers.files import WriteReceipt
from kvstrata.tiers.interface import BatchTier, ChunkTier
from kvstrata.tiers.journal import WriteOutcome

__all__ = ["PublicationTotals", "Publisher", "Submission"]

_POLL_S = 0.5
_QUEUE_ENTRIES = 256
_TOGETHER_BYTES = 8 << 20
"""Of chunks that are written together: who waits for the first of them waits for all."""
_TOGETHER_CHUNKS = 16


@dataclass(frozen=True)
class PublicationTotals:
    """What publishing has cost so far.

    written_bytes, present_bytes: rows new to the tier, and found there already. metadata_bytes: headers and padding.
    service_s: wall time at work. checksum_s (reading back included), write_s: parts of it. cpu_s: processor time of
    the thread. failures: chunks that could not be written. waited, waited_s: chunks that had to wait for credits, and
    the time until those got them that have them.
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
    waited: int = 0
    waited_s: float = 0.0


class Publisher:
    """Writes sealed chunks in the order they were submitted.

    in_use: where what was written is held from eviction. rates: where the time that it took is noted. timeout_s:
    longest time for one chunk, in seconds of `clock`. credits: what may be queued and written at once; by default as
    many bytes as the arena holds, in 256 chunks.
    Errors: `ConfigurationError` for credits that no chunk fits.
    """

    def __init__(
        self,
        directory: Directory,
        tier: ChunkTier,
        layout: SegmentLayout,
        clock: Clock = time.perf_counter,
        in_use: ChunksInUse | None = None,
        rates: ServiceLedger | None = None,
        timeout_s: float = math.inf,
        credits: Credits | None = None,  # noqa: A002 - the word of the field
    ) -> None:
        self.directory = directory
        self.tier = tier
        self.layout = layout
        self._done = PublicationTotals()
        self._clock = clock
        self._in_use = in_use
        self._rates = rates
        self._timeout_s = timeout_s
        self._began = 0.0
        self._chunk_bytes = directory.arena.slot_bytes * directory.layers
        # A chunk that is not whole in the arena is never submitted: of less than one, nothing is.
        arena = max(directory.arena.slots * directory.arena.slot_bytes, self._chunk_bytes)
        self._queue = PublicationQueue(
            credits or Credits(arena, arena, arena, _QUEUE_ENTRIES), self._chunk_bytes, clock
        )
        self.pool = self._queue.pool
        self._stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def totals(self) -> PublicationTotals:
        """What was done so far."""
        return replace(self._done, waited=self._queue.waited, waited_s=self._queue.waited_s)

    def start(self) -> None:
        """Start the thread."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstrata-publish", daemon=True)
        self._thread.start()

    def submit(self, record: ChunkRecord) -> Submission:
        """Queue a sealed chunk, or let it wait for credits. Does not block.

        Its slots stay in place until the write is acknowledged. Errors: `StoreError` for a chunk that is not whole.
        """
        if record.file in (FileReplicaState.WRITING, FileReplicaState.PUBLISHED):
            return Submission.KNOWN
        if record.resident != self.directory.layers:
            raise StoreError(Reason.CHUNK_MISSING, "only a chunk that is whole in memory can be published")
        job = Job(record, [])
        with self._queue.lock:
            try:
                self.directory.mark(record, FileReplicaState.WRITING)
                job.held = self.directory.hold(record)
                return self._queue.enter(job)
            except BaseException:
                # Interrupted: nobody would write it, and nobody may wait for it.
                self._queue.withdraw(job)
                self._let_go(job, FileReplicaState.FAILED)
                raise

    @property
    def pending(self) -> int:
        """Chunks waiting for credits, queued or being written."""
        return len(self._queue.jobs)

    @property
    def waiting(self) -> int:
        """Those of them that wait for credits."""
        return self._queue.waiting

    def wait(self, record: ChunkRecord | None = None) -> float:
        """Block until `record` (or everything submitted) is settled, written or failed; return the seconds waited.

        Errors: `StoreError` with STORE_LATE when the chunk that is being written takes longer than `timeout_s`; it
        stays in memory, and may be waited for again.
        """
        start, queue = self._clock(), self._queue
        with queue.lock:
            while queue.jobs if record is None else queue.holds(record):
                if self._late(start):
                    raise StoreError(
                        Reason.STORE_LATE,
                        f"a chunk was not written within {self._timeout_s:g} s",
                        "its rows are still in memory: try again, check the disk, or pass a longer read_timeout_s",
                    )
                queue.changed.wait(timeout=_POLL_S)
                if self._error is not None or self._thread is None or not self._thread.is_alive():
                    break
        if self._error is not None:
            raise self._error
        return self._clock() - start

    def stop(self) -> None:
        """Finish what was submitted, then end the thread. Blocks; interrupted, it leaves only whole files behind.

        A thread whose write takes longer than `timeout_s` stays behind, and ends after it.
        """
        if self._thread is not None:
            with self._queue.lock:
                self._stopping = True
                self._queue.changed.notify_all()
            start = self._clock()
            while self._thread.is_alive() and not self._late(start):
                self._thread.join(_POLL_S)
            self._thread = None

    def reclaim(self) -> int:
        """After an interruption: take back credits that no chunk holds; returns how many. Does not block."""
        return self._queue.reclaim()

    def _late(self, since: float) -> bool:
        """Whether nothing has come to its end for too long, for somebody who has waited since then."""
        return self._clock() - max(since, self._began) > self._timeout_s

    def run_one(self) -> bool:
        """Write the next queued chunk on this thread; whether there was one. For an owner that starts no thread."""
        job = self._queue.take()
        if job is not None:
            self._settle([job])
        return job is not None

    def _run(self) -> None:
        queue = self._queue
        while True:
            with queue.lock:
                while (job := queue.take()) is None:
                    if self._stopping:
                        return
                    queue.changed.wait()
                jobs = self._together(job)
            self._settle(jobs)

    def _together(self, first: Job) -> list[Job]:
        """`first` and those queued behind it that are written along."""
        jobs, names = [first], {first.record.digest}
        most = min(_TOGETHER_CHUNKS, _TOGETHER_BYTES // self._chunk_bytes)
        while isinstance(self.tier, BatchTier) and len(jobs) < most and (job := self._queue.take()) is not None:
            if job.record.digest in names:
                self._queue.put_back(job)
                break
            jobs.append(job)
            names.add(job.record.digest)
        return jobs

    def _settle(self, jobs: list[Job]) -> None:
        start, cpu = self._clock(), time.thread_time()
        self._began = start
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
        for job in jobs:
            self._let_go(job, state, failure)
        cpu = time.thread_time() - cpu
        self._add(failures=int(failure is not None), service_s=self._clock() - start, cpu_s=cpu)
        with self._queue.lock:
            for job in jobs:
                self._queue.end(job)

    def _let_go(self, job: Job, state: FileReplicaState, failure: StoreError | None = None) -> None:
        # The slots are let go before the chunk becomes evictable: an eviction must free them at once.
        while job.held:
            self.directory.arena.let_go(job.held.pop())
        if job.record.file is FileReplicaState.WRITING:
            self.directory.mark(job.record, state, failure)

    def _write(self, jobs: list[Job]) -> None:
        chunks = [(job.record.identity, self.layout, self._segments(job)) for job in jobs]
        if len(chunks) > 1 and isinstance(self.tier, BatchTier):
            receipts = self.tier.write_all(chunks)
        else:
            receipts = [self.tier.write(*chunk) for chunk in chunks]
        new = [job.record for job in jobs if not job.record.leased]
        if self._in_use is not None and new:
            missing = self._in_use.hold([record.digest for record in new])
            for record in new:
                record.leased = record.digest not in missing
            if missing:
                raise StoreError(Reason.CHUNK_MISSING, "the chunk was removed as soon as it was written", "save again")
        for receipt in receipts:
            self._count(receipt)

    def _segments(self, job: Job) -> list[list[memoryview]]:
        backing, tokens = self.directory.arena.backing, len(job.record.identity.token_ids)
        return [used_pages(backing.readable(grant.slot), self.layout, tokens) for grant in job.held]

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
        self._done = replace(self._done, **{name: getattr(self._done, name) + value for name, value in amounts.items()})
