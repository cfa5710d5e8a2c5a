"""Under a cap, what nobody needs leaves for what is written, and what somebody needs never does."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from chunks_and_faults import Chunk, make_chunk, make_context, make_history

from kvstrata.errors import ConfigurationError, Reason, StoreError
from kvstrata.sessions import SessionStore
from kvstrata.store import Store
from kvstrata.store.catalog_database import connect_sqlite

CHUNKS = [make_chunk(seed) for seed in range(6)]


def file_bytes(tmp_path: Path) -> int:
    with Store(tmp_path / "measure") as store:
        return store.tier.write(*CHUNKS[0].arguments).bytes


def present(store: Store) -> list[int]:
    return [number for number, chunk in enumerate(CHUNKS) if store.tier.has(chunk.digest)]


def fill(store: Store, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        store.tier.write(*chunk.arguments)


def test_the_least_recently_used_leaves_for_a_new_chunk(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    with Store(tmp_path / "store", max_bytes=3 * size + 100) as store:
        fill(store, CHUNKS[:3])
        store.in_use.hold([CHUNKS[0].digest])
        store.in_use.close()
        fill(store, CHUNKS[3:4])
        assert present(store) == [0, 2, 3]
        assert store.usage().total_bytes <= 3 * size + 100 + store.usage().metadata_bytes
        assert store.room is not None
        assert store.room.latest is not None
        assert [each.chunk for each in store.room.latest.evicted] == [CHUNKS[1].digest]


def test_what_a_session_or_an_open_request_needs_stays_and_the_rest_is_a_typed_refusal(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    context = make_context()
    session = make_history(context, list(range(1, 2 * context.chunk_tokens + 1)))
    with Store(tmp_path / "store", max_bytes=4 * size + 4000) as store:
        fill(store, session)
        SessionStore(store).save(
            "talk",
            context,
            [token for chunk in session for token in chunk.identity.token_ids],
            [chunk.digest for chunk in session],
            2 * context.chunk_tokens,
        )
        fill(store, CHUNKS[:1])
        store.in_use.hold([CHUNKS[0].digest])
        fill(store, CHUNKS[1:3])
        assert present(store) == [0, 2]
        store.in_use.hold([CHUNKS[2].digest])
        with pytest.raises(StoreError) as refusal:
            fill(store, CHUNKS[3:4])
        assert refusal.value.reason is Reason.STORE_FULL
        assert "in 4 chunks are pinned" in refusal.value.cause
        assert "raise the cap by" in refusal.value.next_step
        assert present(store) == [0, 2]
        assert all(store.tier.has(chunk.digest) for chunk in session)


def test_a_newcomer_that_was_asked_for_less_is_declined(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    with Store(tmp_path / "store", max_bytes=2 * size + 100, admission=True) as store:
        fill(store, CHUNKS[:2])
        for _ in range(3):
            store.in_use.hold([chunk.digest for chunk in CHUNKS[:2]])
        store.in_use.close()
        with pytest.raises(StoreError) as refusal:
            fill(store, CHUNKS[2:3])
        assert refusal.value.reason is Reason.NOT_ADMITTED
        assert present(store) == [0, 1]
        for _ in range(8):
            store.in_use.hold([CHUNKS[2].digest])
        fill(store, CHUNKS[2:3])
        assert 2 in present(store)


def test_without_retention_a_cap_refuses(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    with Store(tmp_path / "store", max_bytes=size + 100, retention=None) as store:
        fill(store, CHUNKS[:1])
        with pytest.raises(StoreError) as refusal:
            fill(store, CHUNKS[1:2])
        assert refusal.value.reason is Reason.STORE_FULL
        assert present(store) == [0]


def test_a_policy_that_is_unknown_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="policy='newest'"):
        Store(tmp_path / "store", max_bytes=10**6, retention="newest")
    with Store(tmp_path / "store") as store:
        assert store.collect(()).reason is None


def test_one_query_says_what_may_leave(tmp_path: Path) -> None:
    """Not one for each chunk; it says what was said of each chunk by itself."""
    queries: list[str] = []

    def connect(uri: str) -> sqlite3.Connection:
        connection = connect_sqlite(uri)
        connection.set_trace_callback(queries.append)
        return connection

    with Store(tmp_path / "store", connect=connect) as store, Store(tmp_path / "store") as other:
        fill(store, CHUNKS)
        catalog, theirs = store.catalog, other.catalog
        assert catalog is not None
        assert theirs is not None
        names = [chunk.digest for chunk in CHUNKS]
        catalog.pin(f"session:{'a' * 64}/1", names[:1], None)
        catalog.pin(f"session:{'b' * 64}/1", names[:2], None)
        catalog.pin(catalog.process, names[1:3], 1.0)
        catalog.pin(catalog.process, names[2:4], 2.0**40)
        theirs.pin(theirs.process, names[3:5], 2.0**40)
        queries.clear()
        found = catalog.published()
        assert len([each for each in queries if "SELECT" in each]) == 1
        assert [candidate.chunk for candidate, _ in found] == names
        each = catalog.database.read(lambda database: [catalog.pins.reason_to_keep(database, name) for name in names])
        assert [words for _, words in found] == each
        assert [words.split(" by ")[0] for words in each] == ["it is pinned"] * 2 + ["it is leased"] * 3 + [""]
        assert [candidate.chunk for candidate in catalog.candidates()] == names[5:]
