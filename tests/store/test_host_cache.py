"""Segments come down before they leave, go up again as the same bytes, and the last copy never goes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from chunks_and_faults import LAYERS, LAYOUT
from directory_parts import SIZE, make_directory, make_history, make_ids, segment_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvstrata.contract.states import FileReplicaState, ResidencyState
from kvstrata.errors import StateError
from kvstrata.lab.soak.interrupts import interrupt
from kvstrata.store.admission import AdmissionConfig, AdmissionFilter
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.eviction import Lru
from kvstrata.store.host_cache import DemoteOutcome, HostCache, host_arena, open_host_cache
from kvstrata.tiers.memory import HostBacking, MemoryArena

SEGMENT = LAYOUT.segment_bytes


def make_cache(slots: int, device_slots: int = 12, admission: AdmissionFilter | None = None) -> HostCache:
    directory = make_directory(device_slots)
    directory.host = host_arena(SEGMENT, slots)
    return HostCache(directory, Lru(), admission)


def publish(directory: Directory, record: ChunkRecord) -> None:
    directory.mark(record, FileReplicaState.WRITING)
    directory.mark(record, FileReplicaState.PUBLISHED)


def rows(seed: int, layer: int) -> bytes:
    return segment_bytes(make_ids(SIZE, seed), layer)


def load(cache: HostCache, record: ChunkRecord, layer: int) -> bytes | None:
    buffer = bytearray(SEGMENT)
    return bytes(buffer) if cache.load(record, layer, [memoryview(buffer)]) == SEGMENT else None


def test_a_segment_leaves_the_device_and_comes_back_as_the_same_bytes() -> None:
    cache = make_cache(LAYERS)
    record = make_history(cache.directory, 1).chunks[0]
    for layer in range(LAYERS):
        assert cache.demote(record, layer) is DemoteOutcome.COPIED
        assert record.residency[layer] is ResidencyState.LOWER_VALID
        cache.directory.evict(record, layer)
    assert (record.authority, cache.directory.arena.used_slots, cache.arena.used_slots) == ("host", 0, LAYERS)
    assert [load(cache, record, layer) for layer in range(LAYERS)] == [rows(0, layer) for layer in range(LAYERS)]
    halves = [memoryview(bytearray(SEGMENT // 2)) for _ in range(2)]
    assert cache.load(record, 1, halves) == SEGMENT
    assert b"".join(map(bytes, halves)) == rows(0, 1)
    assert (cache.totals.demoted, cache.totals.hits, cache.totals.hit_bytes) == (LAYERS, LAYERS + 1, 4 * SEGMENT)


def test_a_copy_that_is_there_is_not_made_again() -> None:
    cache = make_cache(LAYERS)
    record = make_history(cache.directory, 1).chunks[0]
    assert [cache.demote(record, 0) for _ in range(2)] == [DemoteOutcome.COPIED, DemoteOutcome.PRESENT]
    assert cache.totals.demoted_bytes == SEGMENT


def test_without_room_an_optional_copy_is_declined_and_the_last_one_is_never_displaced() -> None:
    cache = make_cache(LAYERS)
    first, second = make_history(cache.directory, 2).chunks
    assert cache.demote_whole(first)
    for layer in range(LAYERS):
        cache.directory.evict(first, layer)
    assert cache.demote(second, 0) is DemoteOutcome.DECLINED
    assert cache.demote(second, 0, required=True) is DemoteOutcome.DECLINED
    assert not cache.demote_whole(second)
    assert (second.residency[0], second.resident) == (ResidencyState.DEVICE_VISIBLE, LAYERS)
    publish(cache.directory, first)
    assert cache.demote_whole(second), "a copy that files hold as well may leave for one that they do not"
    assert (cache.totals.displaced, first.host.grants) == (LAYERS, [None] * LAYERS)


class Corrupting(HostBacking):
    """Flips a bit of what is written to a slot, once it has been written."""

    def flush(self, slot: int) -> None:
        self.writable(slot)[5] ^= 4


def test_a_copy_that_went_wrong_is_not_published_and_the_devices_stays() -> None:
    directory = make_directory()
    directory.host = MemoryArena(SEGMENT, Corrupting(SEGMENT, LAYERS))
    cache = HostCache(directory, Lru())
    record = make_history(directory, 1).chunks[0]
    assert cache.demote(record, 0) is DemoteOutcome.FAILED
    assert (record.residency[0], cache.arena.used_slots, cache.totals.damaged) == (ResidencyState.DEVICE_VISIBLE, 0, 1)
    with pytest.raises(StateError, match="last valid"):
        directory.evict(record, 0)
    publish(directory, record)
    payload = rows(0, 1)
    assert not cache.stage(record, 1, [memoryview(payload)], xxh3_128_digest(payload))
    assert (cache.arena.used_slots, cache.totals.damaged) == (0, 2)


def test_bytes_that_changed_in_host_memory_are_a_miss_and_are_not_met_again() -> None:
    cache = make_cache(LAYERS)
    record = make_history(cache.directory, 1).chunks[0]
    publish(cache.directory, record)
    cache.demote(record, 0)
    grant = record.host.grants[0]
    assert grant is not None
    cache.arena.backing.writable(grant.slot)[7] ^= 1
    assert load(cache, record, 0) is None
    assert (cache.totals.damaged, cache.arena.used_slots, record.host.grants[0]) == (1, 0, None)
    assert load(cache, record, 0) is None
    assert cache.totals.damaged == 1


def test_what_passes_through_is_kept_where_there_is_room() -> None:
    cache = make_cache(1)
    record = make_history(cache.directory, 1).chunks[0]
    publish(cache.directory, record)
    payload = rows(0, 0)
    parts = [memoryview(payload)[:100], memoryview(payload)[100:]]
    assert cache.stage(record, 0, parts, xxh3_128_digest(payload))
    assert cache.stage(record, 0, parts, xxh3_128_digest(payload))
    assert (load(cache, record, 0), cache.totals.staged) == (payload, 1)


def test_equal_demand_displaces_nothing_and_more_of_it_does() -> None:
    cache = make_cache(1, admission=AdmissionFilter(AdmissionConfig(counters=64, sample=640)))
    first, second = make_history(cache.directory, 2).chunks
    for record in (first, second):
        publish(cache.directory, record)
        cache.demote(record, 0)
    for _ in range(3):
        assert [load(cache, record, 0) is not None for record in (first, second)] == [True, False]
        assert cache.demote(second, 0) is DemoteOutcome.DECLINED
    for _ in range(2):
        assert load(cache, second, 0) is None
    assert cache.demote(second, 0) is DemoteOutcome.COPIED
    assert (load(cache, second, 0), load(cache, first, 0)) == (rows(1, 0), None)


def test_the_last_user_takes_the_host_slots_along() -> None:
    cache = make_cache(LAYERS)
    history = make_history(cache.directory, 1)
    assert cache.demote_whole(history.chunks[0])
    history.close()
    assert (cache.arena.used_slots, cache.directory.arena.used_slots) == (0, 0)
    again = make_history(cache.directory, 1).chunks[0]
    assert load(cache, again, 0) is None
    assert cache.demote_whole(again)
    assert load(cache, again, 2) == rows(0, 2)


@pytest.mark.parametrize("point", ["belongs", "readable", "publish_host"])
def test_an_interrupt_during_a_demotion_leaves_the_device_copy_and_no_slot(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(LAYERS)
    record = make_history(cache.directory, 1).chunks[0]
    owner = {
        "belongs": cache.directory.arena,
        "readable": cache.directory.arena.backing,
        "publish_host": cache.directory,
    }[point]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, point, interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.demote(record, 0)
    assert (record.residency[0], cache.arena.used_slots) == (ResidencyState.DEVICE_VISIBLE, 0)
    assert cache.demote(record, 0) is DemoteOutcome.COPIED
    cache.directory.evict(record, 0)
    assert cache.directory.arena.used_slots == LAYERS - 1


def test_a_directory_without_a_host_tier_has_no_cache() -> None:
    assert open_host_cache(make_directory()) is None
    with pytest.raises(StateError, match="no host tier"):
        HostCache(make_directory(), Lru())


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_any_order_of_moves_keeps_every_row(seed: int, slots: int) -> None:
    """Whatever is demoted, evicted, displaced, promoted or published: every segment is readable, and as it was."""
    source, cache = random.Random(seed), make_cache(slots, device_slots=9)
    directory = cache.directory
    history = make_history(directory, 3)
    files: set[bytes] = set()
    moves: list[Callable[[ChunkRecord, int], object]] = [
        lambda record, layer: cache.demote(record, layer, required=source.random() < 0.5),
        lambda record, layer: directory.valid_copies(record, layer) > 1 and directory.evict(record, layer),
        lambda record, layer: load(cache, record, layer),
    ]
    for _ in range(120):
        record, layer = source.choice(history.chunks), source.randrange(LAYERS)
        if source.random() < 0.05 and record.digest not in files:
            publish(directory, record)
            files.add(record.digest)
        elif source.random() < 0.25 and record.grants[layer] is None and (grant := directory.reserve(record, layer)):
            number = history.chunks.index(record)
            found = load(cache, record, layer)
            assert found is not None or record.digest in files
            directory.arena.backing.writable(grant.slot)[:] = found or rows(number, layer)
            directory.publish(record, layer, grant)
        else:
            source.choice(moves)(record, layer)
        for number, item in enumerate(history.chunks):
            for each in range(LAYERS):
                assert directory.valid_copies(item, each) >= 1
                grant = item.grants[each]
                if grant is not None:
                    assert bytes(directory.arena.backing.readable(grant.slot)) == rows(number, each)
        assert directory.arena.used_slots == sum(item.resident for item in history.chunks)
        held = sum(grant is not None for item in history.chunks for grant in item.host.grants)
        assert cache.arena.used_slots == held <= slots
    history.close()
    assert (directory.arena.used_slots, cache.arena.used_slots) == (0, 0)


def test_a_chunk_larger_than_the_tier_is_not_called_demoted() -> None:
    """Every segment may go while the device has it too, so the last ones displace the first."""
    cache = make_cache(LAYERS - 1)
    record = make_history(cache.directory, 1).chunks[0]
    assert not cache.demote_whole(record)
    assert record.resident == LAYERS


def test_a_copy_of_an_older_epoch_makes_room_for_a_valid_one() -> None:
    cache = make_cache(LAYERS)
    record = make_history(cache.directory, 1).chunks[0]
    assert cache.demote_whole(record)
    before = record.host.generation
    record.host.epoch -= 1
    assert load(cache, record, 0) is None
    assert cache.demote_whole(record)
    assert record.host.generation > before
    assert [load(cache, record, layer) for layer in range(LAYERS)] == [rows(0, layer) for layer in range(LAYERS)]


def test_a_slot_that_changes_hands_under_a_demotion_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(LAYERS)
    history = make_history(cache.directory, 1)
    record = history.chunks[0]
    backing = cache.arena.backing
    monkeypatch.setattr(backing, "flush", lambda slot: history.close() if history.chunks else None)
    assert cache.demote(record, 0) is DemoteOutcome.FAILED
    assert (cache.arena.used_slots, cache.directory.arena.used_slots) == (0, 0)


@pytest.mark.parametrize("line", range(1, 120, 3))
@pytest.mark.parametrize("action", ["demote", "evict"])
def test_an_interrupt_loses_no_slot_of_either_tier(action: str, line: int) -> None:
    directory = make_directory()
    directory.host = host_arena(SEGMENT, LAYERS - 1)
    cache = open_host_cache(directory, "expected_value")
    assert cache is not None
    record = make_history(directory, 1).chunks[0]
    publish(directory, record)
    cache.demote(record, 0)
    cache.demote(record, 1)
    call = {"demote": lambda: cache.demote(record, 2, required=True), "evict": lambda: directory.evict_host(record, 0)}
    interrupt(call[action], line)
    directory.reclaim({grant for grant in record.grants if grant is not None})
    cache.reclaim()
    assert cache.arena.used_slots == sum(grant is not None for grant in record.host.grants)
    for layer, grant in enumerate(record.host.grants):
        assert grant is None or load(cache, record, layer) == rows(0, layer), "a sound copy counts as damaged"
    assert all(directory.valid_copies(record, layer) >= 2 for layer in range(LAYERS))
    for layer in range(LAYERS):
        assert cache.demote(record, layer, required=True) in (DemoteOutcome.COPIED, DemoteOutcome.PRESENT)
    directory.drop(record)
    assert (cache.arena.used_slots, directory.arena.used_slots) == (0, 0)
