"""Rows of the host tier that are read where they lie: sound ones only, and held no longer than they are read."""

from __future__ import annotations

import pytest
from chunks_and_faults import LAYERS, LAYOUT
from directory_parts import SIZE, make_directory, make_history, make_ids, segment_bytes

from kvstrata.errors import Reason, StateError
from kvstrata.placement.near_data import HostRows
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.eviction import Lru
from kvstrata.store.host_cache import HostCache, host_arena


def make_cache(slots: int = 2 * LAYERS) -> HostCache:
    directory = make_directory()
    directory.host = host_arena(LAYOUT.segment_bytes, slots)
    return HostCache(directory, Lru())


def on_host(cache: HostCache, seed: int = 0) -> ChunkRecord:
    """A chunk whose only copies lie in the host tier."""
    record = make_history(cache.directory, 1, seed).chunks[0]
    for layer in range(LAYERS):
        cache.demote(record, layer)
        cache.directory.evict(record, layer)
    return record


def held(cache: HostCache) -> int:
    return sum(cache.arena._holders)


def damage(cache: HostCache, record: ChunkRecord, layer: int) -> None:
    grant = record.host.grants[layer]
    assert grant is not None
    view = cache.arena.backing.writable(grant.slot)
    view[17] ^= 1


def test_a_segment_is_lent_in_place_and_given_back() -> None:
    cache = make_cache()
    record, rows = on_host(cache), HostRows(cache.directory)
    for layer in range(LAYERS):
        segment = rows.borrow(record, layer)
        assert segment is not None
        assert segment.numpy().tobytes() == segment_bytes(make_ids(SIZE), layer)
    grant = record.host.grants[1]
    assert grant is not None
    cache.arena.backing.writable(grant.slot)[0] ^= 1
    again = rows.borrow(record, 1)
    assert again is not None
    assert again[0] == segment_bytes(make_ids(SIZE), 1)[0] ^ 1, "in place: no copy was made"
    assert held(cache) == LAYERS + 1
    rows.give_back()
    assert held(cache) == 0
    rows.give_back()


def test_what_leaves_while_it_is_lent_stays_until_it_is_given_back() -> None:
    cache = make_cache(LAYERS)
    record, rows = on_host(cache), HostRows(cache.directory)
    segment = rows.borrow(record, 0)
    assert segment is not None
    before = segment.numpy().tobytes()
    used = cache.arena.used_slots
    cache.directory.revoke_host(record, 0)
    assert cache.arena.used_slots == used
    assert segment.numpy().tobytes() == before
    rows.give_back()
    assert cache.arena.used_slots == used - 1


def test_a_damaged_copy_is_revoked_and_not_lent() -> None:
    cache = make_cache()
    record, rows = on_host(cache), HostRows(cache.directory)
    damage(cache, record, 1)
    assert rows.has(record, 1)
    assert rows.borrow(record, 1) is None
    assert not rows.has(record, 1)
    assert record.host.grants[1] is None
    assert rows.borrow(record, 1) is None
    assert rows.borrow(record, 0) is not None
    rows.give_back()
    assert held(cache) == 0
    assert cache.arena.used_slots == LAYERS - 1, "its slot is free again"


def test_a_slot_that_has_changed_hands_is_verified_anew() -> None:
    cache = make_cache(LAYERS)
    first, rows = on_host(cache), HostRows(cache.directory)
    grant = first.host.grants[0]
    assert grant is not None
    assert rows.borrow(first, 0) is not None
    rows.give_back()
    for layer in range(LAYERS):
        cache.directory.revoke_host(first, layer)
    second = on_host(cache, seed=1)
    taken = next(layer for layer in range(LAYERS) if second.host.grants[layer].slot == grant.slot)  # type: ignore[union-attr]
    damage(cache, second, taken)
    assert rows.borrow(second, taken) is None
    assert rows.borrow(first, 0) is None
    rows.give_back()
    assert held(cache) == 0


def test_without_a_host_tier_nothing_is_lent() -> None:
    directory = make_directory()
    rows = HostRows(directory)
    record = make_history(directory, 1).chunks[0]
    assert not rows.has(record, 0)
    assert rows.borrow(record, 0) is None
    rows.give_back()


def test_a_host_tier_that_went_away_is_noticed() -> None:
    cache = make_cache()
    record, rows = on_host(cache), HostRows(cache.directory)
    assert rows.borrow(record, 0) is not None
    cache.directory.host = None
    with pytest.raises(StateError) as caught:
        rows.give_back()
    assert caught.value.reason is Reason.NOT_COMMITTED
