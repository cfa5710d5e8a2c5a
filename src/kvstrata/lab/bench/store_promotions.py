"""Promotions of a layer's cold segments from files, alone and beside eight busy threads, and what sharing saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.contract.layout import SegmentLayout
from kvstrata.cost.credits import Credits
from kvstrata.lab.bench.result import BenchRow, interleaved, median_interval
from kvstrata.lab.bench.store_chunks import make_identity, make_segments
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.destinations import SlotDestination
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.promotion import Promoter
from kvstrata.store.segment_copier import OpenedEachTime, SegmentCopier
from kvstrata.store.transfer_records import Refusal, SegmentSource, UnitKey
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.files import FileTier
from kvstrata.tiers.memory import HostBacking, MemoryArena

__all__ = ["promotion_rows"]

_LAYOUT = SegmentLayout(3, 9, 64, "bfloat16", chunk_tokens=256)
_LAYERS = 2
_CHUNKS = 24
_THREADS = 8
_SHARED_BY = 8


def promotion_rows(path: Path, rounds: int) -> list[BenchRow]:
    """Batches of 24 segments of 192 KiB through the transfer queue, and a bare loop of verified reads beside it."""
    tier = FileTier(path)
    segments = make_segments(_LAYOUT, _LAYERS)
    identities = [make_identity(_LAYOUT, _LAYERS, number) for number in range(_CHUNKS)]
    for identity in identities:
        tier.write(identity, _LAYOUT, segments)
    directory = Directory(_arena(_CHUNKS), _LAYERS)
    records = [directory.acquire(identity, on_file=True) for identity in identities]
    promoter = Promoter(directory, tier, _LAYOUT)
    files = [tier.open(identity.digest) for identity in identities]
    try:
        promote = _promotion(directory, promoter, records)
        targets = [memoryview(bytearray(_LAYOUT.segment_bytes)) for _ in files]

        def bare() -> float:
            start = time.perf_counter()
            for file, target in zip(files, targets, strict=True):
                file.read_into(0, [target])
            return time.perf_counter() - start

        alone = interleaved({"queue": promote, "bare": bare}, rounds)
        busy = _beside_others(path.with_name("others"), lambda: [promote() for _ in range(rounds)])
    finally:
        for file in files:
            file.close()
        promoter.close()
    ratio = median_interval([a / b for a, b in zip(alone["queue"], alone["bare"], strict=True)])
    overhead = median_interval([a - b for a, b in zip(alone["queue"], alone["bare"], strict=True)])
    p50, bare_s = median_interval(alone["queue"]).median, median_interval(alone["bare"]).median
    n = ratio.n
    return [
        BenchRow(
            "store.promotion.p50", p50 * 1e3, "ms", bare_s * 1e3, ratio.median, n=n, low=ratio.low, high=ratio.high
        ),
        BenchRow("store.promotion.p99", _quantile(alone["queue"]) * 1e3, "ms", n=n),
        BenchRow("store.promotion.overhead", overhead.median * 1e6, "us a batch", n=n),
        BenchRow(f"store.promotion.beside_{_THREADS}_threads.p50", median_interval(busy).median * 1e3, "ms", n=n),
        BenchRow(f"store.promotion.beside_{_THREADS}_threads.p99", _quantile(busy) * 1e3, "ms", n=n),
        _coalescing(tier),
    ]


def _quantile(samples: Sequence[float], share: float = 0.99) -> float:
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def _arena(slots: int) -> MemoryArena:
    return MemoryArena(_LAYOUT.segment_bytes, HostBacking(_LAYOUT.segment_bytes, slots))


def _promotion(directory: Directory, promoter: Promoter, records: list[ChunkRecord]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        promotions = promoter.reserve([(record, 0) for record in records])
        assert promotions is not None
        promoter.start(promotions).finish()
        taken = time.perf_counter() - start
        for record in records:
            directory.evict(record, 0)
        return taken

    return run


def _beside_others(path: Path, work: Callable[[], list[float]]) -> list[float]:
    """Run `work` while eight threads put and get chunks of their own."""
    stop = threading.Event()

    def churn(number: int) -> None:
        tier = FileTier(path / str(number))
        segments = make_segments(_LAYOUT, _LAYERS, number)
        target, count = memoryview(bytearray(_LAYOUT.segment_bytes)), 0
        while not stop.is_set():
            identity = make_identity(_LAYOUT, _LAYERS, count := count + 1)
            tier.write(identity, _LAYOUT, segments)
            with tier.open(identity.digest) as file:
                file.read_into(0, [target])
            tier.path(identity.digest).unlink()

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    try:
        return work()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _coalescing(tier: FileTier) -> BenchRow:
    """Eight requests for the same layer at once: bytes read from files, of those asked for."""
    chunks = [make_identity(_LAYOUT, _LAYERS, number) for number in range(_CHUNKS)]
    arena, context = _arena(_SHARED_BY * len(chunks)), chunks[0].context
    total = len(chunks) * _LAYOUT.segment_bytes
    pool = CreditPool(Credits(total, _SHARED_BY * total, total, _SHARED_BY))
    queue = TransferQueue("files -> device", pool, SegmentCopier(OpenedEachTime(tier)))
    unit = UnitKey(
        context.namespace, context.digest, tuple(SegmentSource(each.digest, 0) for each in chunks), _LAYOUT, "files"
    )
    waiters = []
    for number in range(_SHARED_BY):
        grants = [arena.reserve((number, each.digest)) for each in chunks]
        owners = [(number, each.digest) for each in chunks]
        answer = queue.submit(unit, total, SlotDestination(arena, [g for g in grants if g is not None], owners))
        assert not isinstance(answer, Refusal)
        waiters.append(answer)
    assert all(waiter.finish().ready for waiter in waiters)
    totals = queue.totals
    share = totals.moved_bytes / totals.requested_bytes
    return BenchRow(
        f"store.coalescing.{_SHARED_BY}_requests", totals.moved_bytes, "B read", totals.requested_bytes, share, n=1
    )
