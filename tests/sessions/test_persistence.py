"""Saving and restoring a history without a model: bytes, sharing, misses and what a failure leaves."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from chunks_and_faults import LAYERS, LAYOUT, FaultyFiles, flip, make_context, tree
from directory_parts import SIZE, extend, make_directory, make_history, make_ids, segment_bytes

from kvstrata.contract.identity import ChunkContext, ModelIdentity, Namespace, PositionRule
from kvstrata.contract.states import FileReplicaState
from kvstrata.errors import BudgetError, DamagedError, Reason, SessionError, StateError, StoreError
from kvstrata.sessions import SessionStore
from kvstrata.sessions.persistence import restore_session, save_session
from kvstrata.store import Store
from kvstrata.store.history import History
from kvstrata.store.publication import Publisher

TAIL = 70
TOTAL = 2 * SIZE + TAIL
IDS = [*make_ids(SIZE), *make_ids(SIZE, 1), *make_ids(TAIL, 2)]


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> Iterator[Store]:
    with Store(tmp_path / "store", files=files) as opened:
        yield opened


def make_conversation(store: Store, context: ChunkContext | None = None) -> tuple[History, Publisher]:
    history = make_history(make_directory(30), 2, context=context)
    extend(history, IDS[2 * SIZE :])
    publisher = Publisher(history.directory, store.tier, LAYOUT)
    publisher.start()
    return history, publisher


def save(store: Store, name: str = "talk", context: ChunkContext | None = None) -> None:
    history, publisher = make_conversation(store, context)
    save_session(history, publisher, store, LAYOUT, name)
    publisher.stop()


def empty(slots: int = 30, context: ChunkContext | None = None) -> History:
    return History(make_directory(slots), context or make_context())


def test_a_history_comes_back_with_its_bytes(store: Store) -> None:
    history, publisher = make_conversation(store)
    receipt = save_session(history, publisher, store, LAYOUT, "talk")
    assert (receipt.sequence, receipt.frontier, receipt.chunks) == (1, TOTAL, 3)
    pages = 2 * LAYOUT.kv_heads * LAYOUT.page_bytes
    assert receipt.written_bytes == LAYERS * (2 * LAYOUT.segment_bytes + pages)
    again = save_session(history, publisher, store, LAYOUT, "talk")
    assert (again.sequence, again.written_bytes, again.shared_bytes) == (2, 0, receipt.written_bytes)
    publisher.stop()
    restored = empty()
    found = restore_session(restored, store, LAYOUT, "talk", None)
    assert found.hit
    assert (found.restored_tokens, found.read_bytes) == (TOTAL, LAYERS * pages)
    assert restored.token_ids == IDS
    assert {record.file for record in restored.chunks} == {FileReplicaState.PUBLISHED}
    row = LAYOUT.head_dim * LAYOUT.itemsize
    for layer, grant in enumerate(restored.tail[0].grants):
        expected = segment_bytes(IDS[2 * SIZE :], layer)
        found_bytes = bytes(restored.directory.arena.backing.readable(grant.slot))
        for head in range(LAYOUT.kv_heads):
            for plane in range(2):
                first = head * LAYOUT.head_bytes + plane * LAYOUT.plane_bytes
                last = first + LAYOUT.page_bytes
                rows = (TAIL - LAYOUT.page_tokens) * row
                assert found_bytes[first : first + LAYOUT.plane_bytes] == expected[first : first + LAYOUT.plane_bytes]
                assert found_bytes[last : last + rows] == expected[last : last + rows]
                # What the tail's slot held behind its rows is nobody's history.
                assert not any(found_bytes[last + rows : last + LAYOUT.plane_bytes])


def test_a_prompt_cuts_what_comes_back(store: Store) -> None:
    save(store)
    for wanted in (0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, TOTAL - 1, TOTAL):
        history = empty()
        receipt = restore_session(history, store, LAYOUT, "talk", [*IDS[:wanted], 7])
        assert receipt.hit
        assert (receipt.wanted_tokens, receipt.restored_tokens) == (wanted, wanted)
        assert history.token_ids == IDS[:wanted]
        turned = [*IDS[:wanted], -1, 7]
        if wanted < TOTAL:
            receipt = restore_session(empty(), store, LAYOUT, "talk", turned)
            assert (receipt.reason, receipt.restored_tokens) == (Reason.TOKENS_DIFFER, wanted)
    assert restore_session(empty(), store, LAYOUT, "talk", []).restored_tokens == 0


@pytest.mark.parametrize(
    ("field", "context"),
    [
        ("model.artefact", make_context(model=ModelIdentity("id:other"))),
        ("model.adapters", make_context(model=ModelIdentity("id:test", ("style@1",)))),
        ("model.weights_generation", make_context(model=ModelIdentity("id:test", (), 1))),
        ("position.theta", make_context(position=PositionRule("default", 20000.0))),
        ("namespace.salt", make_context(namespace=Namespace("default", "pepper"))),
    ],
)
def test_another_context_gets_nothing(store: Store, field: str, context: ChunkContext) -> None:
    save(store)
    history = empty(context=context)
    receipt = restore_session(history, store, LAYOUT, "talk", IDS)
    assert receipt.reason is Reason.CONTEXT_DIFFERS
    assert receipt.difference is not None
    assert receipt.difference.field == field
    assert (receipt.restored_tokens, history.frontier, history.directory.arena.used_slots) == (0, 0, 0)


def test_another_tenant_and_unknown_names(store: Store) -> None:
    save(store)
    for name, context in (("nobody", make_context()), ("talk", make_context(namespace=Namespace("b")))):
        with pytest.raises(SessionError) as refusal:
            restore_session(empty(context=context), store, LAYOUT, name, IDS)
        assert refusal.value.reason is Reason.SESSION_UNKNOWN
    with pytest.raises(SessionError):
        restore_session(empty(), store, LAYOUT, "talk", IDS, sequence=2)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_damaged_header_ends_the_restore_before_it(store: Store, index: int) -> None:
    save(store)
    chunk = SessionStore(store).load("talk").chunks[index]
    flip(store.tier.path(chunk), 50)
    history = empty()
    receipt = restore_session(history, store, LAYOUT, "talk", None)
    assert (receipt.reason, receipt.restored_tokens) == (Reason.CHUNK_DAMAGED, index * SIZE)
    assert chunk.hex() in receipt.detail
    assert not store.tier.has(chunk)
    save(store)
    assert restore_session(empty(), store, LAYOUT, "talk", None).hit


def test_damage_found_by_a_restore_is_known_to_the_requests_that_share_the_chunk(store: Store) -> None:
    """What they hold of it is the last copy from then on, and is not evicted."""
    history, publisher = make_conversation(store)
    save_session(history, publisher, store, LAYOUT, "talk")
    record = history.chunks[1]
    flip(store.tier.path(record.digest), 50)
    receipt = restore_session(History(history.directory, make_context()), store, LAYOUT, "talk", None)
    assert receipt.reason is Reason.CHUNK_DAMAGED
    assert not record.evictable
    save_session(history, publisher, store, LAYOUT, "talk")
    assert record.evictable
    publisher.stop()
    assert restore_session(empty(), store, LAYOUT, "talk", None).hit


def test_a_full_disk_makes_nothing_visible(store: Store, files: FaultyFiles) -> None:
    history, publisher = make_conversation(store)
    before = tree(store.path)
    files.named["pwritev"] = errno.ENOSPC
    with pytest.raises(StoreError) as refusal:
        save_session(history, publisher, store, LAYOUT, "talk")
    assert refusal.value.reason is Reason.STORE_FULL
    assert tree(store.path) == before
    files.named.clear()
    assert save_session(history, publisher, store, LAYOUT, "talk").sequence == 1
    publisher.stop()


@pytest.mark.parametrize("writes", range(4))
def test_a_disk_that_fills_up_in_the_middle(store: Store, files: FaultyFiles, writes: int) -> None:
    """Whichever write fails, no session becomes visible; afterwards the same history is saved."""
    history, publisher = make_conversation(store)
    real, left = files.pwritev, [writes]

    def limited(*arguments: object) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "no room")
        return int(real(*arguments))

    files.pwritev = limited  # type: ignore[attr-defined]
    with pytest.raises(StoreError) as refusal:
        save_session(history, publisher, store, LAYOUT, "talk")
    assert refusal.value.reason is Reason.STORE_FULL
    assert SessionStore(store).list() == []
    assert all(verdict.sound for verdict in store.verify())
    assert store.usage().temporary == 0
    del files.pwritev  # type: ignore[attr-defined]
    save_session(history, publisher, store, LAYOUT, "talk")
    publisher.stop()
    assert restore_session(empty(), store, LAYOUT, "talk", None).hit


def test_a_chunk_that_is_nowhere_is_named(store: Store) -> None:
    history, publisher = make_conversation(store)
    save_session(history, publisher, store, LAYOUT, "talk")
    record = history.chunks[0]
    history.directory.evict(record, 1)
    store.tier.path(record.digest).unlink()
    with pytest.raises(DamagedError) as failure:
        save_session(history, publisher, store, LAYOUT, "talk")
    assert failure.value.reason is Reason.CHUNK_MISSING
    assert failure.value.chunk == record.digest.hex()
    publisher.stop()


def test_no_room_for_the_tail(store: Store) -> None:
    save(store)
    with pytest.raises(BudgetError) as refusal:
        restore_session(empty(slots=LAYERS - 1), store, LAYOUT, "talk", None)
    assert refusal.value.reason is Reason.BUDGET_TOO_SMALL
    assert refusal.value.required_bytes == LAYERS * LAYOUT.segment_bytes
    assert restore_session(empty(slots=LAYERS), store, LAYOUT, "talk", None).hit


def test_what_cannot_be_saved(store: Store) -> None:
    history, publisher = make_conversation(store)
    with pytest.raises(StateError):
        save_session(empty(), publisher, store, LAYOUT, "talk")
    with pytest.raises(SessionError):
        save_session(history, publisher, store, LAYOUT, "")
    history.extend_tail(1)
    history.commit(1, None)
    with pytest.raises(StateError, match="embeddings"):
        save_session(history, publisher, store, LAYOUT, "talk")
    publisher.stop()
    with Store(store.path, read_only=True) as locked, pytest.raises(StoreError) as refusal:
        save_session(history, None, locked, LAYOUT, "talk")
    assert refusal.value.reason is Reason.STORE_READ_ONLY
