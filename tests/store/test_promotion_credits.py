"""Reads that cannot arrive in time are refused, and those that lack credits wait while some are about to come back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from chunks_and_faults import LAYERS, LAYOUT, GatedReads, make_context, make_history, write_all
from directory_parts import make_directory
from transfer_parts import StandingClock

from kvstrata.cost.credits import Credits
from kvstrata.errors import Reason, StoreError
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.promotion import Promoter
from kvstrata.store.service_ledger import ServiceLedger
from kvstrata.tiers.files import FileTier
from kvstrata.tiers.throttled import Link, ThrottledTier

CHUNKS = make_history(make_context(), list(range(1, 3 * LAYOUT.chunk_tokens + 1)))


@pytest.fixture
def files() -> GatedReads:
    return GatedReads()


@pytest.fixture
def tier(tmp_path: Path, files: GatedReads) -> FileTier:
    tier = FileTier(tmp_path, files=files)
    write_all(tier, CHUNKS)
    return tier


@pytest.fixture
def directory() -> Directory:
    return make_directory(slots=7)


def records(directory: Directory) -> list[ChunkRecord]:
    return [directory.acquire(chunk.identity, on_file=True) for chunk in CHUNKS]


def test_a_read_that_would_be_late_is_refused_before_a_byte_moves(directory: Directory, tier: FileTier) -> None:
    """Ten seconds for each segment were measured; three do not come in fifteen."""
    clock = StandingClock()

    def pass_by(seconds: float) -> None:
        clock.now += seconds

    link = Link(LAYOUT.segment_bytes / 10.0, 0.0, clock=clock, sleep=pass_by)
    promoter = Promoter(directory, ThrottledTier(tier, link), LAYOUT, 0, clock, timeout_s=15.0, rates=ServiceLedger())
    (record, *_) = records(directory)
    for _ in range(8):
        promoter.start(promoter.reserve([(record, 0)]) or []).finish()
        directory.evict(record, 0)
    moved, wanted = link.totals.bytes, [(record, layer) for layer in range(LAYERS)]
    with pytest.raises(StoreError) as refusal:
        promoter.start(promoter.reserve(wanted) or [])
    assert refusal.value.reason is Reason.DEADLINE
    assert "need about 30.000000 s, and 15.000000 s are left" in refusal.value.cause
    assert link.totals.bytes == moved
    assert (directory.arena.used_slots, promoter.pool.outstanding) == (0, ())
    promoter.start(promoter.reserve([(record, 0)]) or []).finish()
    directory.evict(record, 0)
    clock.now += 61.0
    batch = promoter.start(promoter.reserve(wanted) or [])
    batch.abandon()
    assert (directory.arena.used_slots, promoter.pool.outstanding) == (0, ())
    promoter.close()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_read_waits_for_credits_while_a_reader_is_about_to_give_some_back(
    directory: Directory, tier: FileTier, files: GatedReads, comes_back: bool
) -> None:
    """Or until its deadline, by the clock of the memory."""
    clock = StandingClock()
    size = LAYOUT.segment_bytes
    promoter = Promoter(directory, tier, LAYOUT, 1, clock, 30.0, credits=Credits(size, size, size, 1))
    first, second, _ = records(directory)
    files.gate.clear()
    hung = promoter.start(promoter.reserve([(first, 0)]) or [])
    assert files.waiting.wait(60)
    hung.waiters[0].cancel()

    def later() -> None:
        while not promoter.queue.totals.waited:
            time.sleep(0.001)
        if comes_back:
            files.gate.set()
        else:
            clock.now += 30.0

    thread = threading.Thread(target=later)
    thread.start()
    wanted = promoter.reserve([(second, 0)]) or []
    if comes_back:
        assert promoter.start(wanted).finish().nbytes == size
    else:
        with pytest.raises(StoreError) as refusal:
            promoter.start(wanted)
        assert refusal.value.reason is Reason.CREDIT_PRESSURE
        assert promoter.queue.totals.waited_s == 30.0
        files.gate.set()
    thread.join()
    hung.abandon()
    assert promoter.queue.totals.waited == 1
    assert promoter.pool.outstanding == ()
    promoter.close()


def test_credits_that_only_the_caller_can_give_back_are_not_waited_for(directory: Directory, tier: FileTier) -> None:
    """They belong to rows that have arrived, and that nobody takes over while this thread waits."""
    first, second, _ = records(directory)
    promoter = Promoter(directory, tier, LAYOUT, 1, credits=Credits(10**9, LAYOUT.segment_bytes, 10**9, 9))
    arrived = promoter.start(promoter.reserve([(first, 0)]) or [])
    with promoter.queue.lock:
        assert promoter.queue.changed.wait_for(lambda: not promoter.queue.busy, 60)
    with pytest.raises(StoreError) as refusal:
        promoter.start(promoter.reserve([(second, 0)]) or [])
    assert refusal.value.reason is Reason.CREDIT_PRESSURE
    assert promoter.queue.totals.waited == 0
    arrived.finish()
    promoter.start(promoter.reserve([(second, 0)]) or []).finish()
    promoter.close()
