"""Rows, then proxy, then index; nothing is reclaimed under a reader."""

from __future__ import annotations

from dataclasses import replace

import pytest
from retrieval_cases import make_scene

from kvstrata.contract.manifest import DeletionReceipt, Fallback, ResidentSet
from kvstrata.contract.manifest.publication import IndexPublication, SelectorPublication
from kvstrata.contract.states import SnapshotState
from kvstrata.errors import Reason, RetrievalError, StateError
from kvstrata.lab.conform.manifest_scene import Scene
from kvstrata.store.leases import LeaseTable
from kvstrata.store.retrieval import CommittedRows, Publications, ReclaimOutcome, Searches, Snapshot


def deleted(durable: bool = True) -> DeletionReceipt:
    return DeletionReceipt("index 6", "host", durable)


def next_snapshots(scene: Scene) -> tuple[Snapshot[SelectorPublication], Snapshot[IndexPublication]]:
    line = scene.retrieval.publications
    selector = line.write_selector(None, basis="b", dtype="int8", shape=(2,), revision="2")
    line.publish_selector(selector)
    index = line.write_index(None, selector)
    line.publish_index(index)
    return selector, index


def test_a_proxy_needs_published_rows() -> None:
    old = make_scene().retrieval.rows
    line = Publications(CommittedRows(old.context, old.layout), Searches(LeaseTable(), 1.0))
    with pytest.raises(RetrievalError) as refusal:
        line.write_selector(None, basis="b", dtype="int8", shape=(1,), revision="1")
    assert refusal.value.reason is Reason.COVERAGE_BEYOND_FRONTIER
    with pytest.raises(RetrievalError) as empty:
        line.index_for()
    assert empty.value.reason is Reason.SNAPSHOT_NOT_PUBLISHED


def test_what_is_only_written_is_seen_by_nobody() -> None:
    scene = make_scene()
    line = scene.retrieval.publications
    selector = line.write_selector(None, basis="b", dtype="int8", shape=(1,), revision="1")
    index = line.write_index(None, selector)
    assert (selector.generation, index.generation) == (5, 7)
    assert (selector.state, index.state) == (SnapshotState.WRITTEN, SnapshotState.WRITTEN)
    assert scene.retrieval.manifest().index.generation == 6
    with pytest.raises(RetrievalError) as refusal:
        line.publish_index(index)
    assert refusal.value.reason is Reason.SNAPSHOT_NOT_PUBLISHED
    line.indexes.abandon(index)
    assert line.indexes.find(7) is None
    assert line.indexes.reserve().generation == 8


def test_a_reserved_generation_holds_nothing() -> None:
    snapshot = make_scene().retrieval.publications.indexes.reserve()
    with pytest.raises(StateError) as refusal:
        _ = snapshot.record
    assert refusal.value.reason is Reason.SNAPSHOT_NOT_PUBLISHED


def test_a_newer_index_takes_new_look_ups_and_an_older_one_ends_its_own() -> None:
    scene = make_scene()
    _, index = next_snapshots(scene)
    with pytest.raises(RetrievalError) as refusal:
        scene.look_up()
    assert refusal.value.reason is Reason.SNAPSHOT_NOT_PUBLISHED
    scene.finish_gather()
    assert scene.admit() is scene.partial
    assert scene.retrieval.manifest().index == index.record


def test_an_index_is_reclaimed_after_its_last_look_up_and_not_before() -> None:
    scene = make_scene()
    line = scene.retrieval.publications
    calls: list[int] = []

    def delete() -> DeletionReceipt:
        calls.append(1)
        return deleted()

    assert line.reclaim_index(6, delete) is ReclaimOutcome.STILL_SERVING
    next_snapshots(scene)
    assert line.reclaim_index(6, delete) is ReclaimOutcome.LOOKUP_IN_FLIGHT
    assert line.reclaim_selector(4, delete) is ReclaimOutcome.BUILT_UPON
    assert calls == []
    scene.finish_gather()
    assert line.reclaim_index(6, lambda: deleted(durable=False)) is ReclaimOutcome.DELETION_NOT_DURABLE
    assert line.indexes.find(6) is not None
    assert line.reclaim_index(6, delete) is ReclaimOutcome.RECLAIMED
    assert line.indexes.find(6) is None
    assert line.reclaim_selector(4, delete) is ReclaimOutcome.RECLAIMED
    assert line.reclaim_index(6, delete) is ReclaimOutcome.RECLAIMED
    assert calls == [1, 1]


def test_a_lease_that_ended_keeps_the_index_until_its_reader_has_left() -> None:
    scene = make_scene()
    next_snapshots(scene)
    line = scene.retrieval.publications
    reading = scene.retrieval.searches.reading(scene.lookup.number)
    reading.__enter__()
    scene.now = 31.0
    assert line.reclaim_index(6, deleted) is ReclaimOutcome.READER_LEFT
    with pytest.raises(StateError) as refusal:
        reading.__exit__(None, None, None)
    assert refusal.value.reason is Reason.LEASE_EXPIRED
    assert line.reclaim_index(6, deleted) is ReclaimOutcome.RECLAIMED


def test_an_abandoned_look_up_pins_nothing_for_ever() -> None:
    scene = make_scene()
    next_snapshots(scene)
    scene.now = 31.0
    assert scene.retrieval.publications.reclaim_index(6, deleted) is ReclaimOutcome.RECLAIMED


def test_a_tombstone_hides_an_index_with_none_to_follow() -> None:
    scene = make_scene()
    scene.retrieval.publications.indexes.tombstone()
    with pytest.raises(RetrievalError) as refusal:
        scene.retrieval.manifest()
    assert refusal.value.reason is Reason.SNAPSHOT_NOT_PUBLISHED
    scene.retrieval.finish(scene.lookup)
    assert scene.retrieval.publications.reclaim_index(6, deleted) is ReclaimOutcome.RECLAIMED


def test_a_manifest_of_a_reclaimed_index_is_stale() -> None:
    scene = make_scene()
    next_snapshots(scene)
    scene.retrieval.finish(scene.lookup)
    assert scene.retrieval.publications.reclaim_index(6, deleted) is ReclaimOutcome.RECLAIMED
    with pytest.raises(RetrievalError) as refusal:
        scene.look_up()
    assert refusal.value.reason is Reason.STALE_SELECTOR_GENERATION


@pytest.mark.parametrize(
    ("resident", "fallback", "accepted"),
    [
        (None, None, False),
        (ResidentSet(6), None, True),
        (ResidentSet(0, 8), None, True),
        (ResidentSet(6, 7), None, False),
        (ResidentSet(7), None, False),
        (None, Fallback.RECOMPUTE, True),
    ],
)
def test_an_older_frontier_needs_a_declared_cover(
    resident: ResidentSet | None, fallback: Fallback | None, accepted: bool
) -> None:
    scene = make_scene()
    line = scene.retrieval.publications
    selector = line.selectors.published
    assert selector is not None
    index = line.write_index(None, selector, entries=((0, 6),), resident=resident, rest_fallback=fallback)
    index.publication = replace(index.record, frontier=6)
    if accepted:
        assert line.publish_index(index).frontier == 6
        return
    with pytest.raises(RetrievalError) as refusal:
        line.publish_index(index)
    assert refusal.value.reason is Reason.INDEX_FRONTIER_GAP
    published = line.indexes.published
    assert published is not None
    assert published.generation == 6
