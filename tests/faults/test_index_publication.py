"""An index that is published before the rows it points to, over the rows that SmolLM2 generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import CHUNK
from fault_runs import CHUNKS, SETUPS, SavedModel, Setup

from kvstrata.contract.states import SnapshotState
from kvstrata.errors import Reason, RetrievalError
from kvstrata.store.leases import LeaseTable
from kvstrata.store.retrieval import CommittedRows, Publications, Searches
from kvstrata.store.retrieval.snapshots import Snapshot

PROXY = {"basis": "keys", "dtype": "float32", "shape": (30, 3, 64), "revision": "test/1"}


@SETUPS
def test_an_index_before_its_rows_is_refused(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """First no row is published, then one chunk too few: nothing becomes visible, and the rows are not touched."""
    with smol.scene(tmp_path / "store", setup) as scene:
        rows = CommittedRows(scene.memory.context, scene.memory.layout)
        lines = Publications(rows, Searches(LeaseTable(lambda: 0.0), 5))
        with pytest.raises(RetrievalError) as refusal:
            lines.write_selector("proxy", **PROXY)
        assert refusal.value.reason is Reason.COVERAGE_BEYOND_FRONTIER
        *first, last = scene.request.history.chunks
        for record in first:
            rows.publish(record)
        proxy = lines.write_selector("proxy", **PROXY)
        early = lines.write_index("index", proxy, entries=((0, CHUNKS * CHUNK),))
        found = [_refused(lines, lines.write_index("index", proxy))]
        lines.publish_selector(proxy)
        found.append(_refused(lines, early))
        assert found == [Reason.SNAPSHOT_NOT_PUBLISHED, Reason.COVERAGE_BEYOND_FRONTIER]
        assert lines.indexes.published is None
        assert torch.equal(scene.run(), smol.expected(setup))
        rows.publish(last)
        proxy = lines.write_selector("proxy", **PROXY)
        lines.publish_selector(proxy)
        index = lines.write_index("index", proxy)
        assert lines.publish_index(index).entries == ((0, CHUNKS * CHUNK),)
        assert index.state is SnapshotState.PUBLISHED
        assert scene.recomputed == []
        scene.account()


def _refused(lines: Publications, index: Snapshot[object]) -> Reason:
    with pytest.raises(RetrievalError) as refusal:
        lines.publish_index(index)  # type: ignore[arg-type]
    return refusal.value.reason
