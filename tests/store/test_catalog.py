"""The catalog answers what is published, to whom, and in which generation; several processes change it at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chunks_and_faults import LAYOUT, make_chunk, make_context, make_history, write_all
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.identity import Namespace
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.store import Catalog, Lookup, Store
from kvstrata.store.catalog_mirror import Mirror, MirrorEntry, RemovalCounter
from kvstrata.store.catalog_rows import namespace_digest, packed_tokens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


def catalog_of(store: Store) -> Catalog:
    assert store.catalog is not None
    return store.catalog


def test_a_look_up_compares_everything(store: Store) -> None:
    chunk = make_chunk()
    catalog = catalog_of(store)
    assert catalog.find(chunk.identity) is Lookup.MISS
    store.tier.write(*chunk.arguments)
    generation = catalog.figures().generation
    assert catalog.find(chunk.identity) is Lookup.HIT
    assert catalog.find(chunk.identity, generation) is Lookup.HIT
    assert catalog.find(chunk.identity, generation - 1) is Lookup.STALE_GENERATION
    context, namespace = chunk.identity.context.digest, namespace_digest(chunk.identity.context.namespace)
    tokens = packed_tokens(chunk.identity.token_ids)
    name = chunk.digest
    assert catalog.lookup(name, context, namespace, tokens) is Lookup.HIT
    assert catalog.lookup(name, bytes(32), namespace, tokens) is Lookup.FOREIGN
    assert catalog.lookup(name, context, namespace_digest(Namespace("bob")), tokens) is Lookup.FOREIGN
    assert catalog.lookup(name, context, namespace, tokens[:-4]) is Lookup.TOKENS_DIFFER
    assert catalog.lookup(name, context, namespace, tokens[:-4] + bytes(4)) is Lookup.TOKENS_DIFFER


def test_a_chunk_of_another_tenant_is_no_hit(store: Store) -> None:
    mine, theirs = make_chunk(namespace=Namespace("alice")), make_chunk(namespace=Namespace("alice", "salt"))
    store.tier.write(*mine.arguments)
    assert catalog_of(store).find(mine.identity) is Lookup.HIT
    assert catalog_of(store).find(theirs.identity) is Lookup.MISS


def test_what_another_process_writes_and_removes_is_seen_at_once(store: Store) -> None:
    chunk, kept = make_chunk(0), make_chunk(1)
    with Store(store.path) as other, Store(store.path, read_only=True) as reader:
        for writer, watcher in ((store, other), (other, store), (store, reader)):
            writer.tier.write(*chunk.arguments)
            writer.tier.write(*kept.arguments)
            assert catalog_of(watcher).find(chunk.identity) is Lookup.HIT
            assert watcher.tier.has(chunk.digest)
            assert writer.evict([chunk.digest]).removed == (chunk.digest,)
            assert catalog_of(watcher).find(chunk.identity) is Lookup.MISS
            assert catalog_of(watcher).find(kept.identity) is Lookup.HIT
            assert not watcher.tier.has(chunk.digest)


def test_a_row_that_is_being_deleted_is_no_hit(store: Store) -> None:
    chunk = make_chunk()
    store.tier.write(*chunk.arguments)
    with Store(store.path) as other:
        assert other.tier.has(chunk.digest)
        catalog_of(store).journal.start_deleting([chunk.digest], lambda database, name: "")
        assert catalog_of(other).find(chunk.identity) is Lookup.DELETED
        assert not other.tier.has(chunk.digest)
        assert list(other.tier.list()) == []
        assert store.tier.path(chunk.digest).is_file()
        # A writer that meets it finishes the deletion first: the row is a new one.
        before = catalog_of(store).figures().generation
        other.tier.write(*chunk.arguments)
        assert catalog_of(store).journal.finish_deleting([chunk.digest]) == 0
        assert catalog_of(store).figures().generation > before + 1
    assert store.tier.has(chunk.digest)


def test_writing_another_layout_makes_a_new_generation(store: Store) -> None:
    chunk = make_chunk()
    catalog = catalog_of(store)
    store.tier.write(*chunk.arguments)
    first = catalog.figures().generation
    assert catalog.find(chunk.identity, first) is Lookup.HIT
    with Store(store.path) as other:
        assert catalog_of(other).find(chunk.identity, first) is Lookup.HIT
        store.tier.write(chunk.identity, replace(LAYOUT, page_tokens=128), chunk.segments)
        for seen in (catalog, catalog_of(other)):
            assert seen.find(chunk.identity, first) is Lookup.STALE_GENERATION
            assert seen.find(chunk.identity) is Lookup.HIT


def test_a_file_without_a_row_is_no_hit_and_is_replaced_when_written(store: Store) -> None:
    chunk = make_chunk()
    path = store.tier.path(chunk.digest)
    store.tier.write(*chunk.arguments)
    raw = path.read_bytes()
    store.evict([chunk.digest])
    path.write_bytes(raw)
    inode = path.stat().st_ino
    assert not store.tier.has(chunk.digest)
    assert list(store.tier.list()) == []
    with Store(store.path) as other:
        assert not other.tier.has(chunk.digest)
    store.tier.write(*chunk.arguments)
    assert path.stat().st_ino != inode
    assert store.tier.has(chunk.digest)


def test_pinned_chunks_stay(store: Store) -> None:
    chunks = [make_chunk(seed) for seed in range(3)]
    names = write_all(store.tier, chunks)
    catalog = catalog_of(store)
    session = f"session:{'0' * 64}/1"
    with Store(store.path) as other:
        assert catalog.pin(session, names[:1], None) == ()
        assert catalog.pin(catalog.process, names[1:2], 4e9) == ()
        result = other.evict(names)
        assert result.removed == (names[2],)
        assert {item.chunk: item.reason for item in result.refused} == dict.fromkeys(names[:2], Reason.CHUNK_PINNED)
        assert "session" in result.refused[0].cause
        assert "process" in result.refused[1].cause
    assert [item.chunk for item in catalog.candidates()] == []
    assert catalog.pin(catalog.process, [names[0], names[2]], 4e9) == (names[2],)
    catalog.unpin(session)
    catalog.unpin(catalog.process, names[1:2])
    assert {item.chunk for item in catalog.candidates()} == set(names[:2])
    assert [item.reason for item in store.evict(names).refused] == [Reason.CHUNK_MISSING]


def test_leases_end_with_their_time_and_with_their_process(store: Store) -> None:
    names = write_all(store.tier, [make_chunk(seed) for seed in range(2)])
    catalog_of(store).pin(catalog_of(store).process, names[:1], 1.0)
    assert store.evict(names[:1]).removed == (names[0],)
    with Store(store.path) as other:
        catalog_of(other).pin(catalog_of(other).process, names[1:], 4e9)
        assert store.evict(names[1:]).removed == ()
    assert store.evict(names[1:]).removed == (names[1],)


@pytest.mark.parametrize(("owner", "expires"), [("someone", 1.0), ("session:x", 1.0), ("", None)])
def test_a_pin_that_makes_no_sense_is_refused(store: Store, owner: str, expires: float | None) -> None:
    with pytest.raises(ConfigurationError):
        catalog_of(store).pin(owner or catalog_of(store).process, [], expires)


def test_touches_are_written_together_and_order_the_candidates(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        names = write_all(store.tier, [make_chunk(seed) for seed in range(3)])
        catalog = catalog_of(store)
        catalog.touch(names[:1])
        catalog.touch([names[0], names[1]])
        first, second, third = catalog.candidates()
        assert (first.chunk, first.uses) == (names[2], 0)
        assert {second.chunk: second.uses, third.chunk: third.uses} == {names[0]: 2, names[1]: 1}
        assert first.file_bytes == store.tier.path(first.chunk).stat().st_size
        assert [item.chunk for item in catalog.candidates(1)] == [names[2]]
        catalog.touch(names[2:])
    with Store(tmp_path / "store") as store:
        assert {item.chunk: item.uses for item in catalog_of(store).candidates()} == {
            names[0]: 2,
            names[1]: 1,
            names[2]: 1,
        }


def test_a_saved_session_is_pinned_until_it_is_removed(store: Store) -> None:
    from kvstrata.sessions.session_store import SessionStore

    ids = tuple(range(200))
    names = write_all(store.tier, make_history(make_context(), ids))
    sessions = SessionStore(store)
    sessions.save("chat", make_context(), ids, names, len(ids))
    assert {item.reason for item in store.evict(names).refused} == {Reason.CHUNK_PINNED}
    sessions.save("chat", make_context(), ids, names, len(ids))
    sessions.remove("chat", sequence=1)
    assert {item.reason for item in store.evict(names).refused} == {Reason.CHUNK_PINNED}
    assert catalog_of(store).figures().pins == len(names)
    assert sessions.remove("chat").collected.chunks_removed == len(names)
    assert catalog_of(store).figures().pins == 0


@pytest.mark.parametrize("asked", [True, False])
def test_zeros_are_written_where_the_tenant_asks_for_them(tmp_path: Path, asked: bool) -> None:
    chunk = make_chunk(namespace=Namespace("alice"))
    with Store(tmp_path / "store", zero_tenants={"alice"} if asked else ()) as store:
        store.tier.write(*chunk.arguments)
        second = tmp_path / "second name"
        second.hardlink_to(store.tier.path(chunk.digest))
        store.evict([chunk.digest])
        assert not store.tier.path(chunk.digest).exists()
        assert (set(second.read_bytes()) == {0}) is asked


def test_the_mirror_forgets_the_oldest_half_and_stays_right(tmp_path: Path) -> None:
    entries = {bytes([i]) * 32: MirrorEntry((b"c", b"n"), i, b"tok1") for i in range(100)}
    asked: list[bytes] = []

    def fetch(chunk: bytes) -> MirrorEntry | Lookup:
        asked.append(chunk)
        return entries.get(chunk, Lookup.MISS)

    counter = RemovalCounter(tmp_path, read_only=False)
    mirror = Mirror(counter, fetch, lambda mark: ([], (0, 0)), limit_bytes=10 * 324)
    for name in entries:
        assert mirror.lookup(name, b"c", b"n", b"tok1") is Lookup.HIT
    assert len(mirror) <= 10
    assert len(asked) == 100
    assert mirror.lookup(name, b"c", b"n", b"tok1") is Lookup.HIT
    assert len(asked) == 100
    assert mirror.lookup(bytes(32), b"c", b"n", b"tok1", 0) is Lookup.HIT
    assert len(asked) == 101
    counter.close()


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.sampled_from("wrWR"), st.integers(0, 3)), max_size=25))
def test_two_openers_always_agree_with_a_set(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    chunks = [make_chunk(seed, tokens=1) for seed in range(4)]
    model: set[bytes] = set()
    path = tmp_path_factory.mktemp("store")
    with Store(path) as first, Store(path) as second:
        for operation, number in steps:
            store, chunk = (first if operation.islower() else second), chunks[number]
            if operation in "wW":
                store.tier.write(*chunk.arguments)
                model.add(chunk.digest)
            else:
                assert (store.evict([chunk.digest]).removed != ()) == (chunk.digest in model)
                model.discard(chunk.digest)
            for opened in (first, second):
                assert {c.digest for c in chunks if opened.tier.has(c.digest)} == model
                assert set(opened.tier.list()) == model
