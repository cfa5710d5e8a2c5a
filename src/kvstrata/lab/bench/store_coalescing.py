"""What is saved when several requests want the same unit: bytes read from files, and time."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvstrata.cost.credits import Credits
from kvstrata.lab.bench.result import BenchRow, interleaved, median_interval
from kvstrata.lab.bench.store_chunks import BATCH_SHAPE, random_rows
from kvstrata.store import Store
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.destinations import SlotDestination
from kvstrata.store.open_chunks import OpenChunks
from kvstrata.store.segment_copier import SegmentCopier
from kvstrata.store.transfer_records import Refusal, SegmentSource, UnitKey
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.device import open_backing
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["bench_coalescing"]

REQUESTS = 8
_SEGMENTS = 8


def bench_coalescing(rounds: int, seed: int, progress: Callable[[str], None]) -> list[BenchRow]:
    """8 requests, each with slots of its own, for a unit of 8 segments: together in one read, and one after the other.

    One thread reads and fans out; what is read is in the page cache, so that the time saved is that of a copy with its
    checksum over a copy without. Goal: the unit is read once.
    """
    progress(f"coalescing, {REQUESTS} requests")
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        bench = _Requests(store, seed)
        try:
            samples = interleaved({"together": bench.together, "apart": bench.apart}, rounds)
            moved, requested = bench.last
        finally:
            bench.close()
    time_ratio = median_interval([a / b for a, b in zip(samples["together"], samples["apart"], strict=True)])
    return [
        BenchRow(
            f"coalescing.requests{REQUESTS}.bytes",
            moved,
            "bytes",
            requested,
            moved / requested,
            f"= 1/{REQUESTS}",
            moved * REQUESTS == requested,
        ),
        BenchRow(
            f"coalescing.requests{REQUESTS}.time",
            statistics.median(samples["together"]),
            "ms",
            statistics.median(samples["apart"]),
            time_ratio.median,
            n=rounds,
            low=time_ratio.low,
            high=time_ratio.high,
        ),
    ]


class _Requests:
    """last: bytes moved and bytes requested by the latest requests that came together."""

    def __init__(self, store: Store, seed: int) -> None:
        shape, slots = BATCH_SHAPE, REQUESTS * _SEGMENTS
        size = shape.layout.segment_bytes
        identities = [shape.identity(number) for number in range(_SEGMENTS)]
        for identity, rows in zip(identities, random_rows(shape, _SEGMENTS, seed), strict=True):
            store.tier.write(identity, shape.layout, [[each] for each in rows])
        context = shape.context
        segments = tuple(SegmentSource(identity.digest, 0) for identity in identities)
        self.last = (0, 0)
        self._unit = UnitKey(context.namespace, context.digest, segments, shape.layout, "files")
        self._nbytes = _SEGMENTS * size
        self._arena = MemoryArena(size, open_backing(size, slots, torch.device("cpu")))
        self._files = OpenChunks(store.tier)
        pool = CreditPool(Credits(slots * size, slots * size, slots * size, 2 * REQUESTS))
        self._queue = TransferQueue("files -> device", pool, SegmentCopier(self._files))

    def together(self) -> float:
        """Milliseconds until all requests have their rows, submitted before the first read begins."""
        return self._serve(1)

    def apart(self) -> float:
        """Milliseconds until all requests have their rows, each submitted when the one before has ended."""
        return self._serve(REQUESTS)

    def close(self) -> None:
        self._queue.close()
        self._files.close()
        self._arena.close()

    def _serve(self, waves: int) -> float:
        destinations = [self._destination(number) for number in range(REQUESTS)]
        before = self._queue.totals
        start = time.perf_counter()
        share = REQUESTS // waves
        for first in range(0, REQUESTS, share):
            waiters = []
            for each in destinations[first : first + share]:
                answer = self._queue.submit(self._unit, self._nbytes, each)
                if isinstance(answer, Refusal):
                    raise RuntimeError(answer.detail)
                waiters.append(answer)
            if not all(waiter.finish().ready for waiter in waiters):
                raise RuntimeError("a request was not served")
        taken = time.perf_counter() - start
        after = self._queue.totals
        if waves == 1:
            self.last = (
                after.moved_bytes - before.moved_bytes,
                after.requested_bytes - before.requested_bytes,
            )
        for destination in reversed(destinations):
            for grant in reversed(destination.grants):
                self._arena.release(grant)
        return taken * 1e3

    def _destination(self, request: int) -> SlotDestination:
        owners = [(request, number) for number in range(_SEGMENTS)]
        grants: list[Grant] = []
        for owner in owners:
            grant = self._arena.reserve(owner)
            assert grant is not None
            grants.append(grant)
        return SlotDestination(self._arena, grants, owners)
