"""Rows become history chunk by chunk, under names that say all that came before."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from chunks_and_faults import LAYERS, make_context
from directory_parts import SIZE, extend, make_directory, make_history, make_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import Reason, StateError
from kvstrata.lab.soak.interrupts import interrupt
from kvstrata.sessions.snapshots import chunk_identities
from kvstrata.store.history import History


@settings(max_examples=40)
@given(st.lists(st.integers(1, 2 * SIZE), min_size=1, max_size=6))
def test_chunks_are_named_the_same_however_rows_arrive(steps: list[int]) -> None:
    directory = make_directory(slots=60)
    history = History(directory, make_context())
    ids = make_ids(sum(steps))
    sealed, start = [], 0
    for rows in steps:
        assert history.extend_tail(rows)
        sealed += history.commit(rows, ids[start : start + rows])
        start += rows
    expected = chunk_identities(make_context(), ids)
    full = [item.digest for item in expected if len(item.token_ids) == SIZE]
    assert [record.digest for record in history.chunks] == full == [record.digest for record in sealed]
    assert (history.frontier, history.token_ids, history.sealed) == (start, ids, SIZE * len(full))
    tail = history.tail_identity()
    assert (tail.digest if tail else None) == (expected[-1].digest if len(full) < len(expected) else None)
    assert directory.arena.used_slots == LAYERS * (len(history.chunks) + len(history.tail))
    history.close()
    assert (directory.arena.used_slots, len(directory), history.frontier) == (0, 0, 0)


def test_the_tail_takes_all_or_nothing() -> None:
    history = History(make_directory(slots=2 * LAYERS - 1), make_context())
    assert history.extend_tail(SIZE)
    assert history.extend_tail(SIZE)
    assert not history.extend_tail(SIZE + 1)
    assert history.directory.arena.used_slots == LAYERS
    assert len(history.tail) == 1


def test_rows_without_slots_cannot_be_committed() -> None:
    history = History(make_directory(), make_context())
    history.extend_tail(SIZE)
    with pytest.raises(StateError) as refusal:
        history.commit(SIZE + 1, make_ids(SIZE + 1))
    assert refusal.value.reason is Reason.NOT_COMMITTED
    assert history.frontier == 0


def test_rows_without_ids_are_kept_and_never_named() -> None:
    history = make_history(make_directory(slots=30), 1)
    for rows, ids in ((3, None), (SIZE, make_ids(SIZE))):
        history.extend_tail(rows)
        assert history.commit(rows, ids) == []
    assert not history.named
    assert (history.frontier, len(history.chunks), len(history.token_ids)) == (2 * SIZE + 3, 1, SIZE)


def test_stored_chunks_continue_only_their_own_history() -> None:
    identities = chunk_identities(make_context(), make_ids(3 * SIZE + 5))
    strangers = chunk_identities(make_context(), make_ids(3 * SIZE, seed=1))
    history = History(make_directory(), make_context())
    history.append_stored(identities[0])
    for wrong in (identities[0], identities[2], strangers[1]):
        with pytest.raises(StateError) as refusal:
            history.append_stored(wrong)
        assert refusal.value.reason is Reason.NOT_COMMITTED
    history.append_stored(identities[1])
    assert (history.frontier, history.directory.arena.used_slots) == (2 * SIZE, 0)
    assert history.token_ids == make_ids(3 * SIZE + 5)[: 2 * SIZE]
    history.extend_tail(1)
    with pytest.raises(StateError):
        history.append_stored(identities[2])


@pytest.mark.parametrize("position", [0, SIZE, 2 * SIZE, 2 * SIZE + 3, 2 * SIZE + 10])
def test_rows_are_forgotten_from_a_boundary_on(position: int) -> None:
    directory = make_directory()
    history = make_history(directory, 2)
    ids = [*history.token_ids, *make_ids(10, seed=9)]
    extend(history, ids[2 * SIZE :])
    version = history.version
    history.rewind(position)
    assert (history.frontier, history.token_ids) == (position, ids[:position])
    assert len(history.chunks) == len(directory) == min(2, position // SIZE)
    tail = 1 if position > 2 * SIZE else 0
    assert directory.arena.used_slots == LAYERS * (len(history.chunks) + tail)
    assert history.version > version
    again = make_history(directory, 2)
    assert [record.digest for record in again.chunks][: len(history.chunks)] == [r.digest for r in history.chunks]


@pytest.mark.parametrize("position", [-1, 1, SIZE - 1, SIZE + 1, 2 * SIZE + 11])
def test_sealed_rows_cannot_be_cut(position: int) -> None:
    history = make_history(make_directory(), 2)
    extend(history, make_ids(10))
    with pytest.raises(StateError) as refusal:
        history.rewind(position)
    assert refusal.value.reason is Reason.OPERATION_UNSUPPORTED
    assert history.frontier == 2 * SIZE + 10


def test_histories_do_not_take_each_others_tail() -> None:
    directory = make_directory()
    first, second = (History(directory, make_context()) for _ in range(2))
    first.extend_tail(1)
    second.extend_tail(1)
    owners = {chunk.owner for history in (first, second) for chunk in history.tail}
    assert len(owners) == 2
    first.close()
    assert directory.arena.used_slots == LAYERS
    directory.arena.hold(second.tail[0].grants[0], second.tail[0].owner)


def interrupted(call: Callable[[], object], line: int) -> None:
    """Run `call`, with a KeyboardInterrupt before its `line`th line in the history or the directory."""
    passed = 0

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal passed
        if event == "line" and frame.f_code.co_filename.endswith(("history.py", "directory.py")):
            passed += 1
            if passed == line:
                raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("line", range(1, 200, 3))
def test_an_interrupted_commit_is_finished_by_the_next_settle(line: int) -> None:
    """Ctrl-C may come before any line of `commit`, `settle` and what they call."""
    directory = make_directory(slots=30)
    history, ids = History(directory, make_context()), make_ids(SIZE + 1)
    history.extend_tail(SIZE + 1)
    interrupted(lambda: history.commit(SIZE + 1, ids), line)
    history.settle()
    if history.frontier == 0:
        assert history.token_ids == []
        history.commit(SIZE + 1, ids)
    assert (history.frontier, history.token_ids) == (SIZE + 1, ids)
    assert [list(record.identity.token_ids) for record in history.chunks] == [ids[:SIZE]]
    assert history.chunks[0].resident == LAYERS
    assert directory.arena.used_slots == 2 * LAYERS
    history.close()
    assert directory.arena.used_slots == 0


def _interrupted_seal(history: History, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit `ids` and end the sealing of the first chunk after one of its layers."""
    adopt, calls = history.directory.adopt, []

    def interrupt(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        adopt(*arguments)

    history.extend_tail(len(ids))
    with monkeypatch.context() as patch:
        patch.setattr(history.directory, "adopt", interrupt)
        with pytest.raises(KeyboardInterrupt):
            history.commit(len(ids), ids)


def test_other_rows_do_not_get_the_name_of_an_interrupted_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(make_directory(), make_context())
    _interrupted_seal(history, make_ids(SIZE + 1, seed=1), monkeypatch)
    history.rewind(0)
    extend(history, make_ids(SIZE, seed=2))
    assert list(history.chunks[0].identity.token_ids) == make_ids(SIZE, seed=2)
    assert len(history.directory) == 1


def test_closing_after_an_interrupted_seal_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(make_directory(), make_context())
    _interrupted_seal(history, make_ids(SIZE + 1), monkeypatch)
    history.close()
    assert len(history.directory) == 0
    assert history.directory.arena.used_slots == 0


@pytest.mark.parametrize("position", [0, SIZE, 2 * SIZE])
@pytest.mark.parametrize("line", range(1, 60, 2))
def test_an_interrupted_rewind_happened_or_did_not(position: int, line: int) -> None:
    directory = make_directory(slots=40)
    history, ids = History(directory, make_context()), make_ids(2 * SIZE + 3)
    history.extend_tail(len(ids))
    history.commit(len(ids), ids)
    interrupted(lambda: history.rewind(position), line)
    history.settle()
    assert history.frontier in (position, len(ids))
    assert history.token_ids == ids[: history.frontier]
    chunks, tail = divmod(history.frontier, SIZE)
    assert [list(record.identity.token_ids) for record in history.chunks] == [
        ids[i * SIZE : (i + 1) * SIZE] for i in range(chunks)
    ]
    assert len(history.tail) == (1 if tail else 0)
    history.close()
    assert len(history.chunks) == len(history.tail) == 0


@settings(max_examples=30)
@given(st.integers(0, 3 * SIZE), st.integers(0, SIZE), st.integers(0, 2 * SIZE))
def test_held_rows_are_not_committed(before: int, held: int, after: int) -> None:
    """Rows behind `hold` are neither sealed nor named for a save, however many there are."""
    directory = make_directory(slots=60)
    history, ids = History(directory, make_context()), make_ids(before + held + after)
    history.extend_tail(before)
    history.commit(before, ids[:before])
    history.hold = before
    history.extend_tail(held)
    history.commit(held, ids[before : before + held])
    assert (history.committed, history.frontier) == (before, before + held)
    assert history.sealed == before // SIZE * SIZE
    tail = history.tail_identity()
    assert (len(tail.token_ids) if tail else 0) == before - history.sealed
    history.hold = None
    history.extend_tail(after)
    history.commit(after, ids[before + held :])
    assert history.sealed == len(ids) // SIZE * SIZE
    expected = chunk_identities(make_context(), ids)
    assert [record.digest for record in history.chunks] == [e.digest for e in expected if len(e.token_ids) == SIZE]


@settings(max_examples=30)
@given(st.integers(0, 3 * SIZE + 3), st.integers(0, SIZE), st.integers(0, SIZE))
def test_a_fork_shares_chunks_and_copies_the_tail(rows: int, mine: int, theirs: int) -> None:
    directory = make_directory(slots=90)
    history = History(directory, make_context())
    for start in range(0, rows, SIZE):
        extend(history, make_ids(rows)[start : start + SIZE])
    used = directory.arena.used_slots
    other = history.fork()
    assert other is not None
    assert directory.arena.used_slots == used + LAYERS * len(other.tail)
    assert (other.frontier, other.token_ids, other.chunks) == (history.frontier, history.token_ids, history.chunks)
    backing = directory.arena.backing
    for ours, copy in zip(history.tail, other.tail, strict=True):
        for one, two in zip(ours.grants, copy.grants, strict=True):
            assert one.slot != two.slot
            assert bytes(backing.readable(one.slot)) == bytes(backing.readable(two.slot))
    for grown, count, seed in ((history, mine, 1), (other, theirs, 2)):
        assert grown.extend_tail(count)
        grown.commit(count, make_ids(count, seed))
    assert history.token_ids == make_ids(rows) + make_ids(mine, 1)
    assert other.token_ids == make_ids(rows) + make_ids(theirs, 2)
    history.close()
    assert other.frontier == rows + theirs
    assert all(record.users == 1 for record in other.chunks)
    other.close()
    assert (directory.arena.used_slots, len(directory)) == (0, 0)


def test_a_fork_without_memory_is_none_and_takes_nothing() -> None:
    directory = make_directory(slots=2 * LAYERS - 1)
    history = History(directory, make_context())
    extend(history, make_ids(3))
    assert history.fork() is None
    assert directory.arena.used_slots == LAYERS
    assert history.frontier == 3


@pytest.mark.parametrize("line", range(1, 120, 5))
@pytest.mark.parametrize("action", ["close", "rewind", "fork", "restore"])
def test_an_interrupt_leaves_no_chunk_in_use_that_nobody_has(action: str, line: int) -> None:
    directory = make_directory(slots=30)
    history = make_history(directory, 2)
    extend(history, make_ids(10))
    other = History(directory, make_context())
    identity = history.chunks[0].identity
    calls: dict[str, Callable[[], object]] = {
        "close": history.close,
        "rewind": lambda: history.rewind(0),
        "fork": history.fork,
        "restore": lambda: other.append_stored(identity),
    }
    if action == "fork":
        forks: list[History | None] = []
        interrupt(lambda: forks.append(history.fork()), line)
        for each in forks:
            assert each is not None
            each.close()
    else:
        interrupt(calls[action], line)
    for each in (history, other):
        each.close()
        assert each.chunks == []
    directory.reclaim(set())
    assert (len(directory), directory.arena.used_slots) == (0, 0)


@pytest.mark.parametrize("action", ["commit", "restore"])
def test_ids_of_an_interrupted_commit_do_not_shift_those_that_follow(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the ids and the frontier lies a moment in which Ctrl-C may come."""
    directory = make_directory()
    donor = make_history(directory, 1, seed=3)
    history = History(directory, make_context())
    if action == "restore":
        monkeypatch.setattr(directory, "record", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            history.append_stored(donor.chunks[0].identity)
        monkeypatch.undo()
    else:
        assert history.extend_tail(SIZE)
        history.token_ids.extend(make_ids(5, seed=9))  # as a commit leaves them that got no further
    ids = make_ids(SIZE, seed=1)
    extend(history, ids)
    assert list(history.chunks[0].identity.token_ids) == ids
