"""Segments come back whole and verified, or not at all, and every slot is given back once."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import LAYERS, LAYOUT, GatedReads, flip, make_chunk, make_context, make_history, write_all
from directory_parts import make_directory

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import DamagedError, Reason, StateError, StoreError
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.host_cache import host_arena, open_host_cache
from kvstrata.store.promotion import OpenChunks, Promoter
from kvstrata.tiers.fault_plan import FaultInjector, FaultPlan
from kvstrata.tiers.faulty import FaultyTier
from kvstrata.tiers.files import ChunkFile, FileTier
from kvstrata.tiers.interface import ChunkTier
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


@pytest.fixture(params=[1, 2])
def promoter(
    request: pytest.FixtureRequest, directory: Directory, tier: FileTier, files: GatedReads
) -> Iterator[Promoter]:
    promoter = Promoter(directory, tier, LAYOUT, readers=request.param)
    yield promoter
    files.gate.set()
    promoter.close()


def throttled(tier: ChunkTier) -> ThrottledTier:
    return ThrottledTier(tier, Link(1e9, 0.0, clock=lambda: 0.0, sleep=lambda seconds: None))


def records(directory: Directory) -> list[ChunkRecord]:
    return [directory.acquire(chunk.identity, on_file=True) for chunk in CHUNKS]


def test_segments_arrive_with_their_bytes(promoter: Promoter, directory: Directory) -> None:
    wanted = [(record, layer) for record in records(directory)[:2] for layer in range(LAYERS)]
    promotions = promoter.reserve(wanted)
    assert promotions is not None
    arrival = promoter.start(promotions).finish()
    assert (arrival.nbytes, arrival.host_bytes) == (2 * LAYERS * LAYOUT.segment_bytes, 0)
    assert arrival.read_s >= 0
    for chunk, record in zip(CHUNKS, records(directory)[:2], strict=False):
        for layer, grant in enumerate(record.grants):
            assert grant is not None
            assert bytes(directory.arena.backing.readable(grant.slot)) == chunk.payload(layer)


def test_a_segment_is_published_only_after_its_arrival(
    promoter: Promoter, directory: Directory, files: GatedReads
) -> None:
    record = records(directory)[0]
    files.gate.clear()
    promotions = promoter.reserve([(record, 0)])
    assert promotions is not None
    batch = promoter.start(promotions)
    assert files.waiting.wait(60)
    assert record.grants[0] is None
    assert directory.arena.used_slots == 1
    files.gate.set()
    batch.finish()
    assert record.grants[0] == promotions[0].grant


def test_reservations_are_all_or_nothing(promoter: Promoter, directory: Directory) -> None:
    wanted = [(record, layer) for record in records(directory) for layer in range(LAYERS)]
    assert promoter.reserve(wanted) is None
    assert directory.arena.used_slots == 0
    assert len(promoter.reserve(wanted[:7]) or []) == 7


@pytest.mark.parametrize("last", [False, True])
def test_a_damaged_segment_is_not_published_nor_what_was_read_with_it(
    promoter: Promoter, directory: Directory, tier: FileTier, last: bool
) -> None:
    path = tier.path(CHUNKS[1 if last else 0].digest)
    flip(path, path.stat().st_size - 5)
    wanted = [(record, LAYERS - 1) for record in records(directory)[:2]]
    batch = promoter.start(promoter.reserve(wanted) or [])
    with pytest.raises(DamagedError) as failure:
        batch.finish()
    assert failure.value.reason is Reason.CHUNK_DAMAGED
    assert failure.value.chunk == CHUNKS[1 if last else 0].digest.hex()
    batch.abandon()
    arrived = sum(record.resident for record in directory)
    assert directory.arena.used_slots == arrived == promoter.readers - 1
    assert not [record for record in directory if record.digest.hex() == failure.value.chunk and record.resident]
    assert promoter.pool.outstanding == ()


def test_a_disk_error_is_no_damage(promoter: Promoter, directory: Directory, files: GatedReads) -> None:
    """The bytes may be good: the chunk stays a hit, and the next attempt gets it."""
    record = records(directory)[0]
    promoter.files.check_in(promoter.files.check_out(record.digest))
    files.failure = errno.EIO
    with pytest.raises(StoreError) as failure:
        promoter.start(promoter.reserve([(record, 0)]) or []).finish()
    assert not isinstance(failure.value, DamagedError)
    assert failure.value.reason is Reason.STORE_IO
    assert directory.arena.used_slots == 0
    files.failure = 0
    promoter.start(promoter.reserve([(record, 0)]) or []).finish()
    assert record.resident == 1


def test_an_abandoned_batch_gives_its_slots_back_after_its_readers(
    promoter: Promoter, directory: Directory, files: GatedReads
) -> None:
    """Exactly once, and never to anybody else before."""
    record = records(directory)[0]
    files.gate.clear()
    batch = promoter.start(promoter.reserve([(record, layer) for layer in range(LAYERS)]) or [])
    assert files.waiting.wait(60)
    thread = threading.Thread(target=batch.abandon)
    thread.start()
    # What no reader has begun is free at once.
    assert LAYERS >= directory.arena.used_slots >= LAYERS - LAYERS // promoter.readers + 1
    files.gate.set()
    thread.join()
    assert directory.arena.used_slots == 0
    batch.abandon()
    assert directory.arena.free_slots == 7


def test_a_finished_batch_has_nothing_to_abandon(promoter: Promoter, directory: Directory) -> None:
    record = records(directory)[0]
    batch = promoter.start(promoter.reserve([(record, 0)]) or [])
    batch.finish()
    batch.abandon()
    assert record.resident == directory.arena.used_slots == 1


def test_a_late_batch_is_refused_and_frees_its_slots_later(
    directory: Directory, tier: FileTier, files: GatedReads
) -> None:
    promoter = Promoter(directory, tier, LAYOUT, timeout_s=0.01)
    record = records(directory)[0]
    files.gate.clear()
    batch = promoter.start(promoter.reserve([(record, layer) for layer in range(LAYERS)]) or [])
    with pytest.raises(StoreError) as failure:
        batch.finish()
    assert failure.value.reason is Reason.STORE_LATE
    batch.abandon()
    assert directory.arena.used_slots == LAYERS
    files.gate.set()
    while directory.arena.used_slots:
        time.sleep(0.001)
    promoter.close()
    assert record.resident == 0
    assert directory.arena.free_slots == 7


def test_a_slot_that_changed_hands_is_not_published(
    promoter: Promoter, directory: Directory, files: GatedReads
) -> None:
    """The destination's generation is checked when the read has ended."""
    record = records(directory)[0]
    promotions = promoter.reserve([(record, 0)])
    assert promotions is not None
    batch = promoter.start(promotions)
    directory.arena.release(promotions[0].grant)
    taken = directory.arena.reserve((record.digest, 0))
    assert taken is not None
    assert taken.slot == promotions[0].grant.slot
    with pytest.raises(StateError, match="generation"):
        batch.finish()
    assert record.resident == 0


def test_a_chunk_in_another_layout_is_foreign(directory: Directory, tmp_path: Path) -> None:
    layout = SegmentLayout(2, 4, 16, "float32", LAYOUT.chunk_tokens, page_tokens=32)
    other = FileTier(tmp_path / "other")
    chunk = make_chunk(0, layout=layout)
    other.write(*chunk.arguments)
    promoter = Promoter(directory, other, LAYOUT)
    record = directory.acquire(chunk.identity, on_file=True)
    with pytest.raises(DamagedError) as failure:
        promoter.start(promoter.reserve([(record, 0)]) or []).finish()
    promoter.close()
    assert failure.value.reason is Reason.CHUNK_FOREIGN
    assert directory.arena.used_slots == 0


def test_open_files_are_bounded_and_never_closed_under_a_reader(tier: FileTier) -> None:
    chunks = OpenChunks(tier, limit=1)
    opened = [chunks.check_out(chunk.digest) for chunk in CHUNKS]
    target = memoryview(bytearray(LAYOUT.segment_bytes))
    for file, chunk in zip(opened, CHUNKS, strict=True):
        file.read_into(1, [target])
        assert bytes(target) == chunk.payload(1)
    assert chunks.check_out(CHUNKS[0].digest) is opened[0]
    chunks.check_in(opened[0])
    for file in opened:
        chunks.check_in(file)
    with pytest.raises(StateError):
        opened[1].read_into(0, [target])
    chunks.close()
    for file in opened:
        with pytest.raises(StateError):
            file.read_into(0, [target])


def test_a_forgotten_file_is_opened_anew(tier: FileTier) -> None:
    chunks = OpenChunks(tier)
    first = chunks.check_out(CHUNKS[0].digest)
    chunks.check_in(first)
    chunks.forget(CHUNKS[0].digest)
    assert chunks.check_out(CHUNKS[0].digest) is not first
    chunks.close()


def test_a_forgotten_file_is_not_handed_out_and_its_reader_closes_it(tier: FileTier) -> None:
    chunks = OpenChunks(tier)
    first = chunks.check_out(CHUNKS[0].digest)
    chunks.forget(CHUNKS[0].digest)
    target = memoryview(bytearray(LAYOUT.segment_bytes))
    first.read_into(0, [target])
    second = chunks.check_out(CHUNKS[0].digest)
    assert second is not first
    chunks.check_in(first)
    with pytest.raises(StateError):
        first.read_into(0, [target])
    second.read_into(0, [target])
    chunks.check_in(second)
    chunks.close()


class _Gated(FileTier):
    """Opens wait until the test lets them."""

    gate = threading.Event()
    opening = threading.Event()

    def open(self, chunk: bytes) -> ChunkFile:
        file = super().open(chunk)
        self.opening.set()
        assert self.gate.wait(60)
        return file


@pytest.mark.parametrize("forgotten", [True, False])
def test_an_open_that_hangs_holds_up_nobody_else(tmp_path: Path, forgotten: bool) -> None:
    """What was forgotten meanwhile is for its own reader alone."""
    write_all(FileTier(tmp_path), CHUNKS[:1])
    tier, name, opened = _Gated(tmp_path), CHUNKS[0].digest, list[Any]()
    tier.gate, tier.opening = threading.Event(), threading.Event()
    chunks = OpenChunks(tier)
    late = threading.Thread(target=lambda: opened.append(chunks.check_out(name)))
    late.start()
    assert tier.opening.wait(60)
    if forgotten:
        chunks.forget(name)
    tier.gate.set()
    late.join(60)
    again = chunks.check_out(name)
    assert (again is opened[0]) is not forgotten
    chunks.check_in(opened[0])
    chunks.check_in(again)
    target = memoryview(bytearray(LAYOUT.segment_bytes))
    if forgotten:
        with pytest.raises(StateError):
            opened[0].read_into(0, [target])
    assert again.read_into(0, [target]) == LAYOUT.segment_bytes
    chunks.close()


def test_a_copy_of_an_older_epoch_is_not_read(promoter: Promoter, directory: Directory) -> None:
    record = records(directory)[0]
    record.durable.epoch -= 1
    with pytest.raises(DamagedError, match="no valid copy in files") as failure:
        promoter.start(promoter.reserve([(record, 0)]) or []).finish()
    assert failure.value.reason is Reason.CHUNK_MISSING
    assert directory.arena.used_slots == 0


def test_a_segment_is_read_anew_beside_a_reader_that_hangs(
    directory: Directory, tier: FileTier, files: GatedReads
) -> None:
    promoter = Promoter(directory, tier, LAYOUT, readers=2, timeout_s=0.2)
    record = records(directory)[0]
    files.gate.clear()
    late = promoter.start(promoter.reserve([(record, 1)]) or [])
    with pytest.raises(StoreError) as refusal:
        late.finish()
    assert refusal.value.reason is Reason.STORE_LATE
    late.abandon()
    again = promoter.reserve([(record, 1)])
    assert again is not None
    batch = promoter.start(again)
    files.gate.set()
    assert batch.finish().nbytes == LAYOUT.segment_bytes
    with promoter.queue.lock:
        assert promoter.queue.changed.wait_for(lambda: not promoter.queue.book.copying, 60)
    assert bytes(directory.arena.backing.readable(again[0].grant.slot)) == CHUNKS[0].payload(1)
    assert (directory.arena.used_slots, promoter.pool.outstanding) == (1, ())
    promoter.close()


def test_without_readers_whoever_waits_reads(directory: Directory, tier: FileTier) -> None:
    threads = threading.active_count()
    promoter = Promoter(directory, tier, LAYOUT, readers=0)
    items = [(record, 0) for record in records(directory)]
    promotions = promoter.reserve(items)
    assert promotions is not None
    batch = promoter.start(promotions)
    assert (promoter.queue.pending, threading.active_count()) == (1, threads)
    batch.finish()
    for index, (record, layer) in enumerate(items):
        grant = record.grants[layer]
        assert grant is not None
        assert bytes(directory.arena.backing.readable(grant.slot)) == CHUNKS[index].payload(layer)
    promoter.close()


@pytest.mark.parametrize("wrap", [lambda tier: FaultyTier(tier, FaultInjector(FaultPlan())), throttled])
def test_a_wrapped_tier_fills_the_host_tier_as_well(tier: FileTier, wrap: Any) -> None:
    """What is kept there on its way up is held to the file's checksum, which the wrapper's reader tells."""
    directory = make_directory(slots=7)
    directory.host = host_arena(LAYOUT.segment_bytes, 3)
    promoter = Promoter(directory, wrap(tier), LAYOUT, readers=0, host=open_host_cache(directory))
    record = records(directory)[0]
    promotions = promoter.reserve([(record, 1)])
    assert promotions is not None
    promoter.start(promotions).finish()
    grant = record.host.grants[1]
    assert grant is not None
    assert bytes(directory.host.backing.readable(grant.slot)) == CHUNKS[0].payload(1)
    promoter.close()
