"""Promotion of a layer's batch from files into the device's arena: latency, and what the queue adds to bare reads."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvstrata.lab.bench.result import BenchRow, interleaved, median_interval
from kvstrata.lab.bench.store_chunks import BATCH_SHAPE, ChunkShape, random_rows
from kvstrata.store import Store
from kvstrata.store.directory import Directory
from kvstrata.store.promotion import Promoter
from kvstrata.tiers.device import open_backing
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["bench_promotion"]

SEGMENTS = 24
THREADS = 8


def bench_promotion(rounds: int, seed: int, progress: Callable[[str], None]) -> list[BenchRow]:
    """p50 and p99 of `rounds` batches of 24 segments, from the reservation until all are published, against a bare loop
    of reads from the same open files into the same slots; alone and while 8 threads put, get and remove chunks.

    The overhead is taken with no reader thread, so that the same thread does the same reads. Files in the page cache.
    """
    shape = BATCH_SHAPE
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        source = random_rows(shape, SEGMENTS, seed)
        for number, chunk in enumerate(source):
            store.tier.write(shape.identity(number), shape.layout, [[each] for each in chunk])
        for readers in (1, 0):
            progress(f"promotion, {readers} reader threads, alone")
            bench = _Batches(store, shape, readers)
            try:
                samples = interleaved({"queue": bench.promote, "bare": bench.read_bare}, rounds)
                rows += _latency(f"promotion.readers{readers}.alone", samples)
                if not readers:
                    rows += bench.overhead(rounds)
                else:
                    progress(f"promotion, {readers} reader threads, beside {THREADS} threads")
                    with _Beside(store, shape, source[0]) as beside:
                        start = time.perf_counter()
                        samples = interleaved({"queue": bench.promote, "bare": bench.read_bare}, rounds)
                        taken = time.perf_counter() - start
                    rows += _latency(f"promotion.readers{readers}.beside{THREADS}", samples)
                    rows.append(BenchRow(f"promotion.beside{THREADS}.cycles", beside.cycles / taken, "1/s"))
            finally:
                bench.close()
    return rows


class _Batches:
    def __init__(self, store: Store, shape: ChunkShape, readers: int) -> None:
        size = shape.layout.segment_bytes
        self._clock: Callable[[], float] = time.perf_counter
        self._arena = MemoryArena(size, open_backing(size, SEGMENTS, torch.device("cpu")))
        self._directory = Directory(self._arena, shape.layers)
        self._promoter = Promoter(self._directory, store.tier, shape.layout, readers)
        self._records = [self._directory.acquire(shape.identity(each), on_file=True) for each in range(SEGMENTS)]
        self._files = [store.tier.open(record.digest) for record in self._records]

    def overhead(self, rounds: int) -> list[BenchRow]:
        """Processor time of this thread that a batch takes beyond the bare reads, which other work does not change."""
        self._clock = time.thread_time
        samples = interleaved({"queue": self.promote, "bare": self.read_bare}, rounds)
        added = median_interval([1e3 * (a - b) for a, b in zip(samples["queue"], samples["bare"], strict=True)])
        name = "promotion.overhead.processor_time"
        return [
            BenchRow(f"{name}.batch", added.median, "us", n=added.n),
            BenchRow(f"{name}.segment", added.median / SEGMENTS, "us", n=added.n),
        ]

    def promote(self) -> float:
        """Milliseconds of one batch."""
        wanted = [(record, 0) for record in self._records]
        start = self._clock()
        promotions = self._promoter.reserve(wanted)
        assert promotions is not None
        self._promoter.start(promotions).finish()
        taken = self._clock() - start
        for record in reversed(self._records):
            self._directory.evict(record, 0)
        return taken * 1e3

    def read_bare(self) -> float:
        """Milliseconds to read and verify the same segments into the same slots."""
        grants: list[Grant] = []
        for number in range(SEGMENTS):
            grant = self._arena.reserve(number)
            assert grant is not None
            grants.append(grant)
        backing = self._arena.backing
        start = self._clock()
        for file, grant in zip(self._files, grants, strict=True):
            file.read_into(0, [backing.writable(grant.slot)])
            backing.flush(grant.slot)
        taken = self._clock() - start
        for grant in reversed(grants):
            self._arena.release(grant)
        return taken * 1e3

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._promoter.close()
        self._arena.close()


class _Beside:
    """Threads that write a chunk, read it back and remove it, until the block ends."""

    def __init__(self, store: Store, shape: ChunkShape, rows: list[memoryview]) -> None:
        self.cycles = 0
        self._store = store
        self._shape = shape
        self._rows = [[each] for each in rows]
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(THREADS)]

    def __enter__(self) -> _Beside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, thread: int) -> None:
        identity = self._shape.identity(1_000_000 + thread)
        target = memoryview(bytearray(self._shape.layout.segment_bytes))
        while not self._stop.is_set():
            self._store.tier.write(identity, self._shape.layout, self._rows)
            with self._store.tier.open(identity.digest) as file:
                for layer in range(file.layers):
                    file.read_into(layer, [target])
            self._store.evict([identity.digest])
            with self._lock:
                self.cycles += 1


def _latency(name: str, samples: dict[str, list[float]]) -> list[BenchRow]:
    ours, bare = samples["queue"], samples["bare"]
    ratio = median_interval([a / b for a, b in zip(ours, bare, strict=True)])
    median, plain = statistics.median(ours), statistics.median(bare)
    late, late_plain = _percentile(ours, 0.99), _percentile(bare, 0.99)
    return [
        BenchRow(f"{name}.p50", median, "ms/batch", plain, ratio.median, n=ratio.n, low=ratio.low, high=ratio.high),
        BenchRow(f"{name}.p99", late, "ms/batch", late_plain, late / late_plain, n=ratio.n),
    ]


def _percentile(samples: list[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]
