"""One query's way through the real directory and arenas: candidates become the right rows, in time or not at all."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chunks_and_faults import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_cases import make_scene

from kvstrata.contract.manifest import Fallback, FallbackDecision, LookupReceipt
from kvstrata.contract.states import FileReplicaState
from kvstrata.errors import BudgetError, ConfigurationError, DamagedError, Reason, RetrievalError, StateError
from kvstrata.lab.conform.manifest_scene import QUERY, Scene, sentinel
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.retrieval import ChunkTierRows, Gathered
from kvstrata.tiers.files import FileTier


def in_flight(scene: Scene) -> frozenset[int]:
    return scene.retrieval.searches.open()


def test_the_trace_keeps_positions_heads_and_generations_apart() -> None:
    scene = make_scene()
    scene.finish_gather()
    receipt = scene.gather
    assert receipt.positions == (0, 3, 7)
    assert receipt.shape == (3, 4)
    assert receipt.source_tiers == ("device", "host", "host")
    assert receipt.source_replica_generations == (18, 17, 17)
    assert (receipt.destination_allocation_generation, receipt.visibility_event_generation) == (85, 31)
    for index, position in enumerate(receipt.positions):
        keys = [sentinel(1, 1, position, channel) for channel in range(4)]
        assert scene.row(index) == (keys, [500_000 + key for key in keys])
    assert scene.row(1) == ([110030, 110031, 110032, 110033], [610030, 610031, 610032, 610033])
    assert scene.admit() is scene.partial


def test_the_partial_state_is_that_of_a_float64_computation() -> None:
    scene = make_scene()
    scene.finish_gather()
    scores = [
        sum(q * sentinel(1, 1, position, channel) for channel, q in enumerate(QUERY)) / 2 for position in (0, 3, 7)
    ]
    m = max(scores)
    weights = [math.exp(score - m) for score in scores]
    u = [sum(w * (500_000 + sentinel(1, 1, p, c)) for w, p in zip(weights, (0, 3, 7), strict=True)) for c in range(4)]
    state = scene.state
    assert state.m.dtype is state.l.dtype is state.u.dtype is torch.float32
    assert state.m.item() == m
    assert state.l.item() == pytest.approx(sum(weights), rel=1e-6)
    assert state.u[0].tolist() == pytest.approx(u, rel=1e-6)
    assert state.output()[0].tolist() == pytest.approx([each / sum(weights) for each in u], rel=1e-6)


def test_an_fp16_chunk_takes_the_bytes_of_the_ledger() -> None:
    scene = make_scene(dtype="float16")
    assert scene.manifest.tensor.payload_bytes == 512
    arena = scene.retrieval.directory.arena
    assert sum(arena.backing.readable(grant.slot).nbytes for grant in scene.record.grants if grant) == 512
    scene.finish_gather()
    assert scene.gather.bytes == 48


@pytest.mark.parametrize("fallback", Fallback)
def test_after_the_deadline_the_declared_fallback_is_returned(fallback: Fallback) -> None:
    scene = make_scene()
    scene.retrieval.finish(scene.lookup)
    scene.operation = replace(scene.operation, fallback=fallback)
    scene.now = 1.25
    assert scene.look_up() == FallbackDecision(fallback, "lookup", 0.25, 0, Reason.DEADLINE_PASSED)
    assert not in_flight(scene)


def test_a_search_that_is_late_yields_no_candidates() -> None:
    scene = make_scene()
    scene.retrieval.finish(scene.lookup)

    def slow(index: object) -> list[tuple[int, float]]:
        scene.now = 2.0
        return [(0, 1.0)]

    found = scene.retrieval.lookup(scene.manifest, scene.operation, slow)
    assert found == FallbackDecision(Fallback.EXACT_PROMOTE, "lookup", 1.0)
    assert not in_flight(scene)


def test_rows_that_arrived_before_the_deadline_are_not_used_after_it() -> None:
    scene = make_scene()
    host = scene.retrieval.tiers["host"]

    class SlowRows:
        """The host's rows, whose reading outlasts the deadline."""

        capability = host.capability

        def segment(self, record: ChunkRecord, layer: int) -> AbstractContextManager[memoryview]:
            scene.now = 1.5
            return host.segment(record, layer)

    scene.retrieval.tiers["host"] = SlowRows()
    outcome = scene.gather_rows()
    assert isinstance(outcome, FallbackDecision)
    assert outcome == FallbackDecision(Fallback.EXACT_PROMOTE, "gather", 0.5, arrived=2)
    destination = scene.retrieval.destination
    assert destination.arena.free_slots == 1
    assert destination.event(0) == 30
    assert not in_flight(scene)


def test_a_gather_ends_its_look_up_and_cannot_be_repeated() -> None:
    scene = make_scene()
    scene.finish_gather()
    assert not in_flight(scene)
    with pytest.raises(StateError) as refusal:
        scene.gather_rows()
    assert refusal.value.reason is Reason.LEASE_EXPIRED


def test_a_look_up_whose_lease_has_ended_gathers_nothing() -> None:
    scene = make_scene()
    scene.operation = replace(scene.operation, deadline_s=1000.0)
    scene.now = 31.0
    with pytest.raises(StateError) as refusal:
        scene.gather_rows()
    assert refusal.value.reason is Reason.LEASE_EXPIRED
    assert scene.retrieval.destination.arena.free_slots == 1


def test_a_full_destination_is_a_typed_refusal_and_the_look_up_goes_on() -> None:
    scene = make_scene()
    scene.finish_gather()
    assert scene.gathered is not None
    again = scene.look_up()
    assert isinstance(again, LookupReceipt)
    first, scene.lookup = scene.lookup, again
    with pytest.raises(BudgetError, match="96 bytes of gathered rows find no room") as refusal:
        scene.gather_rows()
    assert refusal.value.reason is Reason.BUDGET_TOO_SMALL
    scene.retrieval.release(scene.gathered)
    second = scene.gather_rows()
    assert isinstance(second, Gathered)
    assert (second.receipt.destination_allocation_generation, second.receipt.visibility_event_generation) == (87, 32)
    assert second.receipt.rows == scene.gather.rows
    # The state over the first rows is stale now: its slot was given to others.
    scene.lookup = first
    with pytest.raises(RetrievalError) as stale:
        scene.admit()
    assert stale.value.reason is Reason.STALE_DESTINATION_ALLOCATION


def test_another_request_searches_the_index_of_the_one_before() -> None:
    scene = make_scene()
    scene.retrieval.rows.next_request()
    with pytest.raises(RetrievalError) as refusal:
        scene.look_up()
    assert (refusal.value.reason, refusal.value.field) == (
        Reason.STALE_REQUEST_GENERATION,
        "source.request_generation",
    )
    scene.manifest = scene.retrieval.manifest()
    scene.operation = replace(scene.operation, request_generation=3, manifest_generation=scene.manifest.generation)
    found = scene.look_up()
    assert isinstance(found, LookupReceipt)
    assert (found.candidates, found.index_generation) == ((0, 3, 7), 6)


def test_a_history_that_was_replaced_is_not_searched() -> None:
    scene = make_scene()
    scene.retrieval.rows.next_history()
    with pytest.raises(RetrievalError):
        scene.gather_rows()
    with pytest.raises(RetrievalError):
        scene.look_up()


def test_as_many_sources_as_candidates() -> None:
    scene = make_scene()
    with pytest.raises(ConfigurationError, match="sources names 1 tiers for 3 candidates"):
        scene.retrieval.gather(scene.manifest, scene.operation, scene.lookup, ["device"])


def test_a_tier_without_a_copy_is_refused() -> None:
    scene = make_scene()
    with pytest.raises(RetrievalError) as refusal:
        scene.retrieval.gather(scene.manifest, scene.operation, scene.lookup, ["device", "host", "files"])
    assert refusal.value.reason is Reason.REPLICA_MISSING


def test_a_layer_that_was_evicted_is_refused_and_comes_from_the_tier_below() -> None:
    scene = make_scene()
    scene.retrieval.directory.evict(scene.record, 1)
    with pytest.raises(RetrievalError, match="layer 1 of position 0 has no copy there") as refusal:
        scene.gather_rows()
    assert refusal.value.reason is Reason.REPLICA_MISSING
    outcome = scene.retrieval.gather(scene.manifest, scene.operation, scene.lookup, ["host"] * 3)
    assert isinstance(outcome, Gathered)
    assert outcome.receipt.source_replica_generations == (17, 17, 17)


def test_rows_come_out_of_files_too(tmp_path: Path) -> None:
    scene = make_scene()
    retrieval, record = scene.retrieval, scene.record
    files, arena = FileTier(tmp_path), retrieval.directory.arena
    segments = [[arena.backing.readable(grant.slot)] for grant in record.grants if grant is not None]
    retrieval.directory.mark(record, FileReplicaState.WRITING)
    files.write(record.identity, retrieval.rows.layout, segments)
    retrieval.directory.mark(record, FileReplicaState.PUBLISHED)
    retrieval.tiers["files"] = ChunkTierRows(files, retrieval.rows.layout)
    scene.manifest = replace(retrieval.manifest(), generation=scene.manifest.generation)
    chunk = scene.manifest.directory.chunks[0]
    assert (chunk.authority, chunk.valid_replicas) == ("files", 3)
    assert len({copy.payload for copy in chunk.replicas}) == 1
    with files.open(record.digest) as reader:
        assert chunk.replicas[2].payload == reader.header.payload_digest.hex()
    outcome = retrieval.gather(scene.manifest, scene.operation, scene.lookup, ["device", "files", "files"])
    assert isinstance(outcome, Gathered)
    scene.gathered, scene.gather = outcome, outcome.receipt
    assert scene.row(1) == ([110030, 110031, 110032, 110033], [610030, 610031, 610032, 610033])
    assert outcome.receipt.source_replica_generations == (18, 19, 19)


def test_a_damaged_file_is_no_row(tmp_path: Path) -> None:
    scene = make_scene()
    retrieval, record = scene.retrieval, scene.record
    files, arena = FileTier(tmp_path), retrieval.directory.arena
    retrieval.directory.mark(record, FileReplicaState.WRITING)
    files.write(
        record.identity,
        retrieval.rows.layout,
        [[arena.backing.readable(grant.slot)] for grant in record.grants if grant is not None],
    )
    retrieval.directory.mark(record, FileReplicaState.PUBLISHED)
    retrieval.tiers["files"] = ChunkTierRows(files, retrieval.rows.layout)
    scene.manifest = replace(retrieval.manifest(), generation=scene.manifest.generation)
    path = files.path(record.digest)
    flip(path, path.stat().st_size - 1)
    with pytest.raises(DamagedError) as refusal:
        retrieval.gather(scene.manifest, scene.operation, scene.lookup, ["files"] * 3)
    assert refusal.value.reason is Reason.CHUNK_DAMAGED
    assert retrieval.destination.arena.free_slots == 1
    outcome = retrieval.gather(scene.manifest, scene.operation, scene.lookup, ["host"] * 3)
    assert isinstance(outcome, Gathered)


def test_a_copy_that_took_the_place_of_another_is_read_anew() -> None:
    scene = make_scene()
    retrieval, record, directory = scene.retrieval, scene.record, scene.retrieval.directory
    for layer in range(2):
        directory.evict(record, layer)
    for layer in range(2):
        grant, source = directory.reserve(record, layer), record.host.grants[layer]
        assert grant is not None
        assert source is not None
        assert directory.host is not None
        segment = directory.arena.backing.writable(grant.slot)
        segment[:] = directory.host.backing.readable(source.slot)
        segment[7] ^= 1
        directory.publish(record, layer, grant)
    with pytest.raises(RetrievalError) as stale:
        scene.gather_rows()
    assert stale.value.reason is Reason.STALE_REPLICA_GENERATION
    scene.manifest = replace(retrieval.manifest(), generation=scene.manifest.generation)
    with pytest.raises(RetrievalError) as wrong:
        scene.gather_rows()
    assert wrong.value.reason is Reason.REPLICA_PAYLOAD_DIGEST_MISMATCH


def test_bytes_that_change_on_their_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene()
    backing = scene.retrieval.destination.arena.backing
    slot = backing.writable(0)

    class Flipping:
        """The destination's memory, in which the first byte never arrives."""

        def __getitem__(self, item: slice) -> memoryview:
            slot[0] ^= 1
            return slot[item]

        def __setitem__(self, item: slice, value: memoryview) -> None:
            slot[item] = value

    monkeypatch.setattr(backing, "writable", lambda number: Flipping())
    with pytest.raises(RetrievalError) as refusal:
        scene.gather_rows()
    assert refusal.value.reason is Reason.ROW_DIGEST_MISMATCH
    assert scene.retrieval.destination.arena.free_slots == 1


def test_rows_without_enough_copies_are_not_published() -> None:
    scene = make_scene()
    scene.retrieval.directory.survivors = 3
    with pytest.raises(RetrievalError) as refusal:
        scene.retrieval.publish_rows(scene.record)
    assert refusal.value.reason is Reason.TOO_FEW_REPLICAS


def test_copies_that_hold_other_bytes_are_not_published() -> None:
    scene = make_scene()
    grant = scene.record.grants[0]
    assert grant is not None
    scene.retrieval.directory.arena.backing.writable(grant.slot)[5] ^= 1
    scene.record.device.payload = None
    with pytest.raises(RetrievalError, match="device, host hold different bytes") as refusal:
        scene.retrieval.publish_rows(scene.record)
    assert refusal.value.reason is Reason.REPLICA_PAYLOAD_DIGEST_MISMATCH


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["device", "host"])), unique_by=lambda x: x[0], max_size=3)
)
def test_any_rows_from_any_tiers_arrive_in_their_order(chosen: list[tuple[int, str]]) -> None:
    scene = make_scene()
    scene.search = lambda index: [(position, 0.0) for position, _ in chosen]  # type: ignore[method-assign]
    found = scene.look_up()
    assert isinstance(found, LookupReceipt)
    outcome = scene.retrieval.gather(scene.manifest, scene.operation, found, [tier for _, tier in chosen])
    assert isinstance(outcome, Gathered)
    scene.gathered, scene.gather = outcome, outcome.receipt
    for index, (position, _) in enumerate(chosen):
        keys = [sentinel(1, 1, position, channel) for channel in range(4)]
        assert scene.row(index) == (keys, [500_000 + key for key in keys])
