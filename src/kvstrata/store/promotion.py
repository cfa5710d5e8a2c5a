"""Segments come back from lower tiers into slots: reserve, copy, validate, and only then publish.

Reading happens on a small pool of threads; publishing happens on the caller's thread, so that a kernel never meets a
table entry whose bytes are still arriving.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.ports import Clock
from kvstrata.store.buffers import used_pages
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.host_cache import HostCache
from kvstrata.tiers.files import ChunkFile, FileTier
from kvstrata.tiers.memory import Grant

__all__ = ["Arrival", "Batch", "OpenChunks", "Promoter", "Promotion"]


class OpenChunks:
    """Open chunk files, the least recently used closed first once nobody reads them. Thread-safe."""

    def __init__(self, tier: FileTier, limit: int = 128) -> None:
        self._tier = tier
        self._limit = limit
        self._files: OrderedDict[bytes, ChunkFile] = OrderedDict()
        self._readers: dict[ChunkFile, int] = {}
        self._lock = threading.Lock()

    def check_out(self, chunk: bytes) -> ChunkFile:
        """The open file, header verified. Errors: `DamagedError` as `FileTier.open`. Every call needs a `check_in`."""
        with self._lock:
            file = self._files.get(chunk)
            if file is None:
                file = self._files[chunk] = self._tier.open(chunk)
            self._files.move_to_end(chunk)
            self._readers[file] = self._readers.get(file, 0) + 1
            return file

    def check_in(self, file: ChunkFile) -> None:
        """End of one reader's use."""
        with self._lock:
            self._readers[file] -= 1
            if not self._readers[file]:
                del self._readers[file]
                if file not in self._files.values():
                    file.close()
            excess = len(self._files) - self._limit
            for name in [name for name, each in self._files.items() if each not in self._readers][: max(0, excess)]:
                self._files.pop(name).close()

    def forget(self, chunk: bytes) -> None:
        """Never hand this file out again: its bytes were revoked. Whoever reads it now closes it."""
        with self._lock:
            file = self._files.pop(chunk, None)
            if file is not None and file not in self._readers:
                file.close()

    def close(self) -> None:
        """Close everything."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()


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


@dataclass(frozen=True, slots=True)
class _PartResult:
    nbytes: int
    host_bytes: int
    seconds: float
    error: StoreError | None


class Batch:
    """Promotions issued together; `finish` waits for all of them and publishes what is whole.

    A reader that is late keeps its slots until it has acknowledged, however long that takes; nobody else gets them.
    """

    def __init__(self, directory: Directory, items: Sequence[Promotion], parts: int, timeout_s: float) -> None:
        self._directory = directory
        self.items = items
        self._parts = [Future[_PartResult]() for _ in range(parts)]
        self._timeout_s = timeout_s
        self._settled = False
        self._lock = threading.RLock()

    @property
    def settled(self) -> bool:
        """Whether its slots are published or given back, so that no reader writes to them any more."""
        return self._settled

    def perform(self, part: int, read: Callable[[Sequence[Promotion]], _PartResult]) -> None:
        """Run by a reader: read one part, unless the batch has been abandoned before."""
        future = self._parts[part]
        with self._lock:
            if future.cancelled():
                return
            future.set_running_or_notify_cancel()
        share = -(-len(self.items) // len(self._parts))
        try:
            future.set_result(read(self.items[part * share : (part + 1) * share]))
        except BaseException as error:  # noqa: BLE001 - whoever waits for the part is to see it
            future.set_exception(error)

    def finish(self) -> Arrival:
        """Wait, publish every segment, and tell what that cost. Blocks.

        Errors: `DamagedError` when a segment is missing, short or altered, `StoreError` when it could not be read or
        not in time; nothing of the batch is published then and all of its slots are given back.
        """
        late = wait(self._parts, self._timeout_s).not_done
        if late:
            self._leave_behind()
            raise StoreError(
                Reason.STORE_LATE,
                f"{len(late)} of {len(self._parts)} reads of a layer did not end within {self._timeout_s:g} s",
                "the rows are still there: try the step again, check the disk, or pass a longer read_timeout_s",
            )
        results = [part.result() for part in self._parts]
        error = next((result.error for result in results if result.error is not None), None)
        if error is not None:
            self._give_back()
            raise error
        for item in self.items:
            self._directory.publish(item.record, item.layer, item.grant)
        self._settled = True
        return Arrival(
            sum(result.nbytes for result in results),
            sum(result.host_bytes for result in results),
            sum(result.seconds for result in results),
        )

    def abandon(self) -> None:
        """Give the slots back once the readers have acknowledged. Blocks for that, but not past the deadline.

        Also after a `finish` that was interrupted; after one that ended there is nothing left to do.
        """
        if self._settled:
            return
        with self._lock:
            for part in self._parts:
                if not part.done() and part.cancel():
                    # `wait` takes it for done only now; a reader that comes to it later leaves it alone.
                    part.set_running_or_notify_cancel()
        if wait(self._parts, self._timeout_s).not_done:
            self._leave_behind()
        else:
            self._give_back()

    def _leave_behind(self) -> None:
        """Let the last reader to acknowledge give the slots back."""

        def acknowledged(_: Future[_PartResult]) -> None:
            if all(part.done() for part in self._parts):
                self._give_back()

        for part in self._parts:
            part.add_done_callback(acknowledged)

    def _give_back(self) -> None:
        with self._lock:
            if self._settled:
                return
            self._settled = True
        for item in self.items:
            self._directory.abandon(item.record, item.layer, item.grant)


class Promoter:
    """Reads segments with `readers` threads. Owner calls `close`.

    timeout_s: longest wait for a batch. host: a tier in between, which is asked first and keeps what passes through.
    """

    def __init__(
        self,
        directory: Directory,
        tier: FileTier,
        layout: SegmentLayout,
        readers: int = 1,
        clock: Clock = time.perf_counter,
        timeout_s: float = 30.0,
        host: HostCache | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._host = host
        self.directory = directory
        self.layout = layout
        self.files = OpenChunks(tier)
        self.readers = readers
        self._clock = clock
        self._batches: list[Batch] = []
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="kvstrata-read")

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

    def start(self, promotions: Sequence[Promotion]) -> Batch:
        """Begin reading into the reserved slots. Does not block."""
        share = max(1, -(-len(promotions) // self.readers))
        batch = Batch(self.directory, promotions, -(-len(promotions) // share), self._timeout_s)
        # Known before a reader begins: whatever interrupts this call, its slots are not taken for forgotten ones.
        self._batches = [*(each for each in self._batches if not each.settled), batch]
        for part in range(-(-len(promotions) // share)):
            self._pool.submit(batch.perform, part, self._read)
        return batch

    def reclaim(self, wanted: Collection[Batch]) -> set[Grant]:
        """Abandon batches that nobody waits for, and return the grants into which readers may still write.

        wanted: batches that somebody will finish or abandon. Blocks for reads under way, but not past the deadline.
        """
        for batch in self._batches:
            if batch not in wanted:
                batch.abandon()
        return {item.grant for batch in self._batches if not batch.settled for item in batch.items}

    def close(self) -> None:
        """Wait for reads under way, end the threads, close the files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.files.close()

    def _read(self, promotions: Sequence[Promotion]) -> _PartResult:
        start, nbytes, host_bytes = self._clock(), 0, 0
        backing = self.directory.arena.backing
        for item in promotions:
            slot, tokens = item.grant.slot, len(item.record.identity.token_ids)
            try:
                buffers = used_pages(backing.writable(slot), self.layout, tokens)
                loaded = self._host.load(item.record, item.layer, buffers) if self._host is not None else None
                if loaded is None:
                    nbytes += self._read_file(item, buffers)
                else:
                    nbytes, host_bytes = nbytes + loaded, host_bytes + loaded
                backing.flush(slot)
            except StoreError as error:
                return _PartResult(nbytes, host_bytes, self._clock() - start, error)
        return _PartResult(nbytes, host_bytes, self._clock() - start, None)

    def _read_file(self, item: Promotion, buffers: Sequence[memoryview]) -> int:
        name = item.record.digest
        file = self.files.check_out(name)
        try:
            if file.layout != self.layout or file.layers != self.directory.layers:
                raise DamagedError(
                    Reason.CHUNK_FOREIGN,
                    f"chunk {name.hex()[:16]} is stored in another layout: {file.layout}",
                    chunk=name.hex(),
                )
            nbytes = file.read_into(item.layer, buffers)
            if self._host is not None:
                self._host.stage(item.record, item.layer, buffers, file.checksum(item.layer))
            return nbytes
        finally:
            self.files.check_in(file)
