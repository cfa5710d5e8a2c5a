"""Rows out of arenas and files, whatever the geometry."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from chunks_and_faults import LAYOUT, make_chunk
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_cases import make_scene

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import DamagedError, Reason, StateError
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.retrieval import ArenaRows, ChunkTierRows
from kvstrata.store.retrieval.row_tiers import payload_digest, row_views
from kvstrata.tiers.files import FileTier


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_is_where_the_layout_says(data: st.DataObject) -> None:
    heads, pages, page = (data.draw(st.integers(1, 4), name) for name in ("heads", "pages", "page"))
    dim = data.draw(st.integers(1, 9), "dim")
    layout = SegmentLayout(heads, heads, dim, "float16", pages * page, page)
    used = data.draw(st.integers(1, pages), "used")
    segment = np.frombuffer(random.Random(0).randbytes(heads * used * layout.page_bytes), np.uint8)
    rows = segment.reshape(heads, used, 2, page, dim * 2)
    head, row = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(0, used * page - 1))
    key, value = row_views(memoryview(segment.tobytes()), layout, head, row)
    assert bytes(key) == rows[head, row // page, 0, row % page].tobytes()
    assert bytes(value) == rows[head, row // page, 1, row % page].tobytes()


@pytest.mark.parametrize("tokens", [LAYOUT.chunk_tokens, 40])
def test_files_give_out_the_rows_that_were_written(tmp_path: Path, tokens: int) -> None:
    tier, chunk = FileTier(tmp_path), make_chunk(1, tokens)
    tier.write(*chunk.arguments)
    record = ChunkRecord(chunk.identity, len(chunk.segments))
    rows = ChunkTierRows(tier, LAYOUT)
    assert rows.capability.tier == "files"
    with rows.segment(record, 2) as segment:
        assert bytes(segment) == chunk.payload(2)
    with tier.open(chunk.digest) as reader:
        assert payload_digest(record, rows, LAYOUT) == reader.header.payload_digest


def test_a_file_in_another_layout_is_refused(tmp_path: Path) -> None:
    tier, chunk = FileTier(tmp_path), make_chunk(1)
    tier.write(*chunk.arguments)
    other = SegmentLayout(2, 4, 16, "float32", LAYOUT.chunk_tokens, 32)
    with pytest.raises(DamagedError) as refusal, ChunkTierRows(tier, other).segment(ChunkRecord(chunk.identity, 3), 0):
        pass
    assert refusal.value.reason is Reason.CHUNK_FOREIGN


def test_a_slot_stays_in_place_while_its_rows_are_read() -> None:
    scene = make_scene()
    rows = scene.retrieval.tiers["device"]
    assert isinstance(rows, ArenaRows)
    with rows.segment(scene.record, 0) as segment:
        before = bytes(segment)
        scene.retrieval.directory.evict(scene.record, 0)
        assert rows.arena.free_slots == 0
        assert bytes(segment) == before
    assert rows.arena.free_slots == 1
    with pytest.raises(StateError) as refusal, rows.segment(scene.record, 0):
        pass
    assert refusal.value.reason is Reason.REPLICA_MISSING
