"""Sessions are saved whole, found by name and tenant, and removed without taking anything from another."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chunks_and_faults import Crash, FaultyFiles, flip, make_chunk, make_context, make_history, tree, write_all

from kvstrata.contract.identity import ChunkContext, Namespace
from kvstrata.errors import Reason, SessionError, StoreError
from kvstrata.sessions.session_store import SessionStore
from kvstrata.sessions.snapshots import Snapshot
from kvstrata.sessions.verification import verify_snapshots
from kvstrata.store import CollectOutcome, Store
from kvstrata.tiers.files import OsFiles

SHORT, LONG, OTHER = tuple(range(128)), tuple(range(300)), tuple(range(1000, 1200))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


def sessions_of(store: Store) -> SessionStore:
    ticks = itertools.count(1000)
    return SessionStore(store, now=lambda: float(next(ticks)))


def save(
    sessions: SessionStore, name: str, token_ids: tuple[int, ...] = LONG, context: ChunkContext | None = None
) -> Snapshot:
    context = context or make_context()
    chunks = write_all(sessions.store.tier, make_history(context, token_ids))
    return sessions.save(name, context, token_ids, chunks, len(token_ids))


def test_what_was_saved_is_loaded(store: Store) -> None:
    sessions = sessions_of(store)
    saved = save(sessions, "chat")
    assert (saved.sequence, saved.frontier, saved.created_unix) == (1, 300, 1000.0)
    assert sessions.load("chat") == saved
    assert SessionStore(store).load("chat", "default", 1) == saved


def test_earlier_snapshots_stay(store: Store) -> None:
    sessions = sessions_of(store)
    first, second = save(sessions, "chat", SHORT), save(sessions, "chat", LONG)
    assert second.sequence == 2
    assert sessions.load("chat") == second
    assert sessions.load("chat", sequence=1) == first


@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", "a/b/c", "..", "имя", "x" * 255, "[red]x"])
def test_names_never_become_paths(store: Store, name: str) -> None:
    outside = tree(store.path.parent).keys()
    sessions = sessions_of(store)
    save(sessions, name)
    assert sessions.load(name).name == name
    added = tree(store.path.parent).keys() - outside
    assert all(path.startswith(("store/chunks/", "store/sessions/")) for path in added)
    assert sessions.remove(name).session_removed


def test_an_illegal_name_writes_nothing(store: Store) -> None:
    before = tree(store.path)
    sessions = sessions_of(store)
    for call in (
        lambda: sessions.save("a\0b", make_context(), (), (), 0),
        lambda: sessions.load(""),
        lambda: sessions.remove("x" * 256),
    ):
        with pytest.raises(SessionError) as refusal:
            call()
        assert refusal.value.reason is Reason.SESSION_NAME_INVALID
    assert tree(store.path) == before


def test_an_unknown_session_says_so(store: Store) -> None:
    sessions = sessions_of(store)
    save(sessions, "chat")
    for arguments in (("other",), ("chat", "bob"), ("chat", "default", 2)):
        for call in (sessions.load, sessions.remove):
            with pytest.raises(SessionError) as refusal:
                call(*arguments)
            assert refusal.value.reason is Reason.SESSION_UNKNOWN
            assert refusal.value.next_step
    assert sessions.load("chat").sequence == 1


def test_tenants_do_not_see_each_other(store: Store) -> None:
    sessions = sessions_of(store)
    mine = save(sessions, "chat", LONG, make_context(namespace=Namespace("alice")))
    theirs = save(sessions, "chat", LONG, make_context(namespace=Namespace("bob")))
    assert set(mine.chunks).isdisjoint(theirs.chunks)
    assert sessions.load("chat", "alice") == mine
    assert sessions.load("chat", "bob") == theirs
    sessions.remove("chat", "alice")
    assert sessions.load("chat", "bob") == theirs
    assert all(store.tier.has(chunk) for chunk in theirs.chunks)


def test_a_session_whose_chunks_are_not_stored_is_not_saved(store: Store) -> None:
    sessions = sessions_of(store)
    chunks = write_all(store.tier, make_history(make_context(), LONG))
    store.tier.revoke(chunks[1])
    with pytest.raises(StoreError) as refusal:
        sessions.save("chat", make_context(), LONG, chunks, len(LONG))
    assert refusal.value.reason is Reason.CHUNK_MISSING
    assert sessions.list() == []


def test_a_damaged_manifest_is_refused_and_earlier_ones_load(store: Store) -> None:
    sessions = sessions_of(store)
    first = save(sessions, "chat", SHORT)
    save(sessions, "chat", LONG)
    (path,) = store.path.glob("sessions/*/2.json")
    flip(path, 200)
    with pytest.raises(SessionError) as refusal:
        sessions.load("chat")
    assert refusal.value.reason is Reason.SESSION_DAMAGED
    assert sessions.load("chat", sequence=1) == first
    (summary,) = sessions.list()
    assert (summary.latest, summary.sequences, summary.damaged) == (first, (1, 2), (2,))


def test_a_manifest_in_another_sessions_place_is_refused(store: Store) -> None:
    sessions = sessions_of(store)
    save(sessions, "mine", SHORT)
    (mine,) = store.path.glob("sessions/*/1.json")
    save(sessions, "theirs", LONG)
    (theirs,) = set(store.path.glob("sessions/*/1.json")) - {mine}
    mine.write_bytes(theirs.read_bytes())
    with pytest.raises(SessionError) as refusal:
        sessions.load("mine")
    assert refusal.value.reason is Reason.SESSION_DAMAGED
    assert "theirs" in refusal.value.cause


def test_listing_shows_the_latest_first(store: Store) -> None:
    sessions = sessions_of(store)
    assert sessions.list() == []
    for name, ids in (("a", SHORT), ("b", LONG), ("a", LONG)):
        save(sessions, name, ids)
    found = [(item.latest.name, item.sequences) for item in sessions.list() if item.latest]
    assert found == [("a", (1, 2)), ("b", (1,))]


def test_removal_takes_only_what_nobody_else_needs(store: Store) -> None:
    sessions = sessions_of(store)
    short, long = save(sessions, "short", SHORT), save(sessions, "long", LONG)
    other = save(sessions, "other", OTHER)
    assert short.chunks[0] == long.chunks[0]
    result = sessions.remove("long")
    assert (result.snapshots_removed, result.session_removed) == (1, True)
    assert (result.collected.outcome, result.collected.chunks_removed) == (CollectOutcome.DONE, 2)
    assert set(store.tier.list()) == {*short.chunks, *other.chunks}
    assert sessions.remove("short").collected.chunks_removed == 1
    assert sessions.remove("other").collected.chunks_removed == 2
    assert (list(store.tier.list()), sessions.list()) == ([], [])
    assert store.usage().total_bytes == store.usage().metadata_bytes


def test_removing_one_snapshot_keeps_the_others(store: Store) -> None:
    sessions = sessions_of(store)
    short = save(sessions, "chat", SHORT)
    save(sessions, "chat", LONG)
    result = sessions.remove("chat", sequence=2)
    assert (result.snapshots_removed, result.session_removed, result.collected.chunks_removed) == (1, False, 2)
    assert sessions.load("chat") == short


def test_chunks_of_a_running_conversation_are_spared(store: Store) -> None:
    sessions = sessions_of(store)
    save(sessions, "chat", SHORT)
    running = write_all(store.tier, make_history(make_context(), OTHER))
    assert sessions.remove("chat", keep=running).collected.chunks_removed == 1
    assert set(store.tier.list()) == set(running)


def test_chunks_stay_while_somebody_else_uses_the_store(store: Store) -> None:
    sessions = sessions_of(store)
    saved = save(sessions, "chat")
    with Store(store.path):
        result = sessions.remove("chat")
        assert result.session_removed
        assert (result.collected.outcome, result.collected.reason) == (CollectOutcome.BUSY, Reason.STORE_BUSY)
        assert all(store.tier.has(chunk) for chunk in saved.chunks)
    assert sessions.collect().chunks_removed == len(saved.chunks)


@pytest.mark.parametrize("spoil", ["flip", "empty", "stray"])
def test_nothing_is_deleted_while_a_manifest_cannot_be_read(store: Store, spoil: str) -> None:
    sessions = sessions_of(store)
    save(sessions, "kept", OTHER)
    (path,) = store.path.glob("sessions/*/1.json")
    saved = save(sessions, "chat")
    match spoil:
        case "flip":
            flip(path, 100)
        case "empty":
            path.write_bytes(b"")
        case _:
            (path.parent / "copy of 1.json").write_bytes(path.read_bytes())
    result = sessions.remove("chat")
    assert (result.collected.outcome, result.collected.reason) == (CollectOutcome.UNREADABLE, Reason.SESSION_DAMAGED)
    assert str(path.parent) in result.collected.detail
    assert all(store.tier.has(chunk) for chunk in saved.chunks)
    if spoil != "stray":
        sessions.remove("kept")
        assert list(store.tier.list()) == []


def test_a_read_only_store_refuses_to_save_and_to_remove(store: Store) -> None:
    saved = save(sessions_of(store), "chat")
    before = tree(store.path)
    with Store(store.path, read_only=True) as opened:
        sessions = SessionStore(opened)
        assert sessions.load("chat") == saved
        for call in (lambda: sessions.remove("chat"), lambda: sessions.save("x", make_context(), (), (), 0)):
            with pytest.raises(StoreError) as refusal:
                call()
            assert refusal.value.reason is Reason.STORE_READ_ONLY
        assert sessions.collect().outcome is CollectOutcome.READ_ONLY
    assert tree(store.path) == before


@pytest.mark.parametrize("number", [28, 5])
def test_a_save_that_fails_anywhere_leaves_the_session_as_it_was(tmp_path: Path, number: int) -> None:
    context = make_context()
    for durable in (False, True):
        with Store(tmp_path / f"count{durable}", durable=durable) as store:
            chunks = write_all(store.tier, make_history(context, SHORT))
            counting = store.files = FaultyFiles()
            SessionStore(store).save("chat", context, SHORT, chunks, len(SHORT))
        assert counting.calls[-1] == "unlink"
        for index, call in enumerate(counting.calls[:-1]):
            with Store(tmp_path / f"{durable}{index}", durable=durable) as store:
                chunks = write_all(store.tier, make_history(context, SHORT))
                store.files = FaultyFiles(plan={index: number})
                with pytest.raises(StoreError) as refusal:
                    SessionStore(store).save("chat", context, SHORT, chunks, len(SHORT))
                assert refusal.value.reason is (Reason.STORE_FULL if number == 28 else Reason.STORE_IO), call
                assert store.usage().temporary == 0, call
                assert store.usage().snapshots == int("link" in counting.calls[:index]), call


def test_a_process_that_ends_while_saving_leaves_whole_snapshots(tmp_path: Path) -> None:
    context = make_context()
    with Store(tmp_path / "count") as store:
        chunks = write_all(store.tier, make_history(context, SHORT))
        counting = store.files = FaultyFiles()
        SessionStore(store).save("chat", context, SHORT, chunks, len(SHORT))
    for index in range(len(counting.calls)):
        with Store(tmp_path / str(index)) as store:
            chunks = write_all(store.tier, make_history(context, SHORT))
            store.files = FaultyFiles(plan={index: "crash"})
            with pytest.raises(Crash):
                SessionStore(store).save("chat", context, SHORT, chunks, len(SHORT))
        with Store(tmp_path / str(index)) as store:
            assert all(not summary.damaged for summary in SessionStore(store).list())
            assert store.usage().temporary == 0


SAVER = """
import sys
from chunks_and_faults import make_context, make_history, write_all
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import Store
with Store(sys.argv[1]) as store:
    ids = tuple(range(130))
    chunks = write_all(store.tier, make_history(make_context(), ids))
    print(*[SessionStore(store).save("chat", make_context(), ids, chunks, 130).sequence for _ in range(20)])
"""


def test_two_processes_saving_at_once_lose_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SAVER, str(tmp_path / "store")]
    processes = [subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    sequences = [int(word) for output in outputs for word in output.split()]
    assert sorted(sequences) == list(range(1, 41))
    with Store(tmp_path / "store") as store:
        (summary,) = SessionStore(store).list()
        assert summary.sequences == tuple(range(1, 41))
        assert summary.damaged == ()


def test_verification_tells_how_much_of_a_session_can_come_back(store: Store) -> None:
    sessions = sessions_of(store)
    whole, partial = save(sessions, "whole", OTHER), save(sessions, "partial", LONG)
    gone = save(sessions, "gone", tuple(range(5000, 5100)))
    store.tier.revoke(gone.chunks[0])
    verdicts = {item.snapshot: item for item in verify_snapshots(sessions, {partial.chunks[1]: Reason.CHUNK_DAMAGED})}
    assert (verdicts[whole].usable_tokens, verdicts[whole].reason) == (200, None)
    assert (verdicts[partial].usable_tokens, verdicts[partial].reason) == (128, Reason.CHUNK_DAMAGED)
    assert (verdicts[gone].usable_tokens, verdicts[gone].reason) == (0, Reason.CHUNK_MISSING)


def test_the_later_of_two_removals_leaves_the_pins_of_what_was_saved_in_between(tmp_path: Path) -> None:
    """It finds the manifest gone, and another one in its place by the time it lets go of the pins."""
    chunk = make_chunk(0)
    arguments = "talk", chunk.identity.context, chunk.identity.token_ids, [chunk.digest], 128

    class Slow(OsFiles):
        def unlink(self, path: Path, /) -> None:  # type: ignore[override]
            if path.suffix != ".json":
                return path.unlink()
            with Store(tmp_path / "store") as other:
                SessionStore(other).remove("talk")
                try:
                    path.unlink()
                finally:
                    other.tier.write(*chunk.arguments)
                    SessionStore(other).save(*arguments)

    with Store(tmp_path / "store", files=Slow()) as store:
        store.tier.write(*chunk.arguments)
        SessionStore(store).save(*arguments)
        SessionStore(store).remove("talk")
        refused = store.evict([chunk.digest]).refused
        assert [refusal.reason for refusal in refused] == [Reason.CHUNK_PINNED]
        assert store.audit() == []


class _Deaf(OsFiles):
    """From the moment a manifest is linked, or its link refused, the catalog of `store` takes no write."""

    def __init__(self, refused: bool) -> None:
        self.refused = refused
        self.store: Store | None = None

    def link(self, source: Path, target: Path, /) -> None:  # type: ignore[override]
        if self.store is not None:
            self.store.catalog.database.write = self._refuse  # type: ignore[method-assign, union-attr, assignment]
            if self.refused:
                raise OSError(errno.EIO, "no link")
        os.link(source, target)

    @staticmethod
    def _refuse(*_: object, **__: object) -> None:
        raise StoreError(Reason.STORE_BUSY, "another process writes all the time")


@pytest.mark.parametrize("after", ["the next write", "a removal", "another process"])
@pytest.mark.parametrize("refused", [False, True])
def test_what_is_linked_is_saved_whatever_becomes_of_the_catalog(tmp_path: Path, refused: bool, after: str) -> None:
    """The claim is settled later; until then its pins hold, and afterwards nothing of it is left but what is there."""
    files, context = _Deaf(refused), make_context()
    with Store(tmp_path / "store", files=files) as store:
        catalog, sessions = store.catalog, SessionStore(store)
        assert catalog is not None
        chunks = write_all(store.tier, make_history(context, SHORT))
        files.store = store
        if refused:
            with pytest.raises(StoreError) as refusal:
                sessions.save("chat", context, SHORT, chunks, len(SHORT))
            assert refusal.value.reason is Reason.STORE_IO, "the link's failure, not the catalog's"
        else:
            assert sessions.save("chat", context, SHORT, chunks, len(SHORT)).sequence == 1
            assert sessions.load("chat").chunks == tuple(chunks)
        files.store = None
        del catalog.database.write
        assert catalog.figures().reserved_bytes > 0
        assert [each.reason for each in store.evict(chunks).refused] == [Reason.CHUNK_PINNED]
        if after == "the next write":
            store.tier.write(*make_chunk(9).arguments)
        elif after == "a removal":
            save(sessions, "other")
            sessions.remove("other")
            if not refused:
                sessions.remove("chat")
                assert catalog.figures().pins == 0
        if after != "another process":
            assert catalog.figures().reserved_bytes == 0
            assert store.audit() == []
    with Store(tmp_path / "store") as store:
        assert store.catalog is not None
        assert store.catalog.figures().reserved_bytes == 0
        assert store.audit() == []
        there = not refused and after != "a removal"
        assert len(SessionStore(store).list()) == there
        assert bool(store.evict(chunks).refused) == (there or after == "a removal")
