"""What is derived from rows is bound to the rows as they were."""

from __future__ import annotations

import pytest
from chunks_and_faults import LAYERS, LAYOUT, make_context, make_history

from kvstrata.contract.identity import Namespace
from kvstrata.errors import Reason, StateError
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.retrieval import CommittedRows

SIZE = LAYOUT.chunk_tokens


def make_rows(chunks: int = 3) -> tuple[CommittedRows, list[ChunkRecord]]:
    context = make_context()
    records = [ChunkRecord(chunk.identity, LAYERS) for chunk in make_history(context, range(chunks * SIZE))]
    return CommittedRows(context, LAYOUT), records


def test_the_frontier_and_the_publication_move_together() -> None:
    rows, records = make_rows()
    for number, record in enumerate(records, 1):
        rows.publish(record)
        assert (rows.frontier, rows.binding.publication_generation) == (number * SIZE, number)
        assert rows.tensor.positions == number * SIZE
    assert sorted(rows.digests) == [SIZE, 2 * SIZE, 3 * SIZE]
    assert len(set(rows.digests.values())) == 3
    assert rows.digest == rows.digests[3 * SIZE]
    assert [rows.chunk_at(p) for p in (0, SIZE - 1, SIZE, 3 * SIZE - 1)] == [
        records[0],
        records[0],
        records[1],
        records[2],
    ]
    assert rows.chunk_at(-1) is None
    assert rows.chunk_at(3 * SIZE) is None


def test_chunks_come_in_order_and_of_one_context() -> None:
    rows, records = make_rows()
    rows.publish(records[0])
    for wrong in (records[2], records[0]):
        with pytest.raises(StateError) as refusal:
            rows.publish(wrong)
        assert refusal.value.reason is Reason.NOT_COMMITTED
    foreign = make_history(make_context(namespace=Namespace("other")), range(SIZE))[0]
    with pytest.raises(StateError, match=r"namespace\.tenant") as other:
        rows.publish(ChunkRecord(foreign.identity, LAYERS))
    assert other.value.reason is Reason.CONTEXT_DIFFERS
    assert rows.chunks == [records[0]]


def test_another_history_or_namespace_changes_the_source_and_another_request_does_not() -> None:
    rows, records = make_rows()
    rows.publish(records[0])
    digests = [rows.digest]
    rows.next_request()
    assert rows.digest == digests[0]
    rows.next_namespace()
    digests.append(rows.digest)
    rows.next_history()
    assert (rows.frontier, rows.chunks, rows.digests) == (0, [], {})
    rows.publish(records[0])
    digests.append(rows.digest)
    assert len(set(digests)) == 3
    binding = rows.binding
    assert (binding.request_generation, binding.namespace_generation, binding.cache_generation) == (2, 2, 2)
