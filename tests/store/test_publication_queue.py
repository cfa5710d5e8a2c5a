"""What is on its way to the files is bounded, what has to wait keeps its place, and credits come back once."""

from __future__ import annotations

import errno
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import LAYERS, LAYOUT, FaultyFiles, GatedFiles
from directory_parts import make_directory, make_history

from kvstrata.contract.states import FileReplicaState, SlotState
from kvstrata.cost.credits import Credits
from kvstrata.errors import ConfigurationError, Reason, StoreError
from kvstrata.store.directory import Directory
from kvstrata.store.publication import Publisher, Submission
from kvstrata.store.publication_queue import chunk_credits
from kvstrata.tiers.files import FileTier

ONE = chunk_credits(LAYERS * LAYOUT.segment_bytes)


@pytest.fixture
def directory() -> Directory:
    return make_directory(slots=12)


@pytest.fixture
def files() -> GatedFiles:
    return GatedFiles()


def balanced(publisher: Publisher) -> bool:
    """No credit is out, and nobody waits for one."""
    pool = publisher.pool
    return (pool.outstanding, pool.free, publisher.waiting) == ((), pool.total, 0)


def test_no_more_than_the_credits_is_on_its_way_and_the_rest_waits_in_memory(
    directory: Directory, files: GatedFiles, tmp_path: Path
) -> None:
    """What waits is written in order, and `wait` is for those that wait as well."""
    order: list[bytes] = []
    tier = FileTier(tmp_path, files=files)
    publisher = Publisher(directory, tier, LAYOUT, credits=ONE + ONE)
    publisher.start()
    mark = directory.mark

    def marked(item: Any, state: FileReplicaState, failure: StoreError | None = None) -> None:
        if state is FileReplicaState.PUBLISHED:
            order.append(item.digest)
        assert publisher.pool.reserved.queue <= 2
        mark(item, state, failure)

    directory.mark = marked  # type: ignore[method-assign]
    chunks = make_history(directory, 4).chunks
    answers = [publisher.submit(record) for record in chunks]
    assert answers == [Submission.QUEUED, Submission.QUEUED, Submission.WAITING, Submission.WAITING]
    assert publisher.submit(chunks[3]) is Submission.KNOWN
    assert files.waiting.wait(60)
    assert (publisher.pending, publisher.waiting) == (4, 2)
    assert publisher.pool.reserved == ONE + ONE
    assert list(tier.list()) == []
    assert all(record.resident == LAYERS and not record.evictable for record in chunks)
    files.gate.set()
    publisher.wait(chunks[3])
    assert order == [record.digest for record in chunks]
    assert {record.file for record in chunks} == {FileReplicaState.PUBLISHED}
    publisher.stop()
    assert publisher.totals.waited == 2
    assert publisher.totals.waited_s > 0
    assert balanced(publisher)


def test_what_waits_survives_the_end_of_its_request(directory: Directory, files: GatedFiles, tmp_path: Path) -> None:
    publisher = Publisher(directory, FileTier(tmp_path, files=files), LAYOUT, credits=ONE)
    publisher.start()
    history = make_history(directory, 3)
    names = {record.digest for record in history.chunks}
    for record in history.chunks:
        publisher.submit(record)
    assert files.waiting.wait(60)
    history.close()
    assert directory.arena.free_slots == directory.arena.slots - 3 * LAYERS
    files.gate.set()
    publisher.stop()
    assert set(publisher.tier.list()) == names
    assert directory.arena.used_slots == 0
    assert balanced(publisher)


@pytest.mark.parametrize("resource", ["pinned", "staging", "link", "queue"])
def test_credits_that_no_chunk_fits_are_refused(directory: Directory, tmp_path: Path, resource: str) -> None:
    """Else it would wait for ever."""
    amounts = {name: getattr(ONE, name) - (name == resource) for name in ("pinned", "staging", "link", "queue")}
    with pytest.raises(ConfigurationError, match=f"lack {resource}"):
        Publisher(directory, FileTier(tmp_path), LAYOUT, credits=Credits(**amounts))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_credits_come_back_once_however_a_write_ends(
    directory: Directory, tmp_path: Path, seed: int, together: bool
) -> None:
    """Each call of the system fails in its turn, by a full disk, a broken one, or a process that is told to end."""
    failure = (errno.ENOSPC, errno.EIO, "crash")[seed % 3]
    files = FaultyFiles(plan=dict.fromkeys(range(seed, 40, 5), failure))
    publisher = Publisher(directory, FileTier(tmp_path, files=files), LAYOUT, credits=ONE + ONE)
    released: list[int] = []
    give_back = publisher.pool.give_back

    def noted(reservation: Any) -> bool:
        released.append(reservation.serial)
        assert give_back(reservation), "credits were given back twice"
        return True

    publisher.pool.give_back = noted  # type: ignore[method-assign]
    chunks = make_history(directory, 4).chunks
    for record in chunks:
        publisher.submit(record)
    if together:
        publisher.start()
        publisher.stop()
    else:
        while publisher.run_one():
            assert publisher.pool.reserved.queue <= 2
    assert sorted(released) == list(range(4))
    assert balanced(publisher)
    assert publisher.pending == 0
    assert FileReplicaState.FAILED in {record.file for record in chunks}
    assert all(
        directory.arena.state(grant.slot) is SlotState.PUBLISHED for each in chunks for grant in each.grants if grant
    )
    files.plan.clear()
    files.dead = False
    publisher._error = None
    for record in chunks:
        publisher.submit(record)
        while publisher.run_one():
            pass
    assert {record.file for record in chunks} == {FileReplicaState.PUBLISHED}
    assert balanced(publisher)


def test_a_late_write_keeps_its_credits_until_it_ends(directory: Directory, tmp_path: Path) -> None:
    files, ticks = GatedFiles(), itertools.count(0.0, 6.0)
    publisher = Publisher(
        directory, FileTier(tmp_path, files=files), LAYOUT, clock=lambda: next(ticks), timeout_s=10.0, credits=ONE
    )
    publisher.start()
    (thread,) = [each for each in threading.enumerate() if each.name == "kvstrata-publish"]
    first, second = make_history(directory, 2).chunks
    publisher.submit(first)
    assert publisher.submit(second) is Submission.WAITING
    assert files.waiting.wait(60)
    with pytest.raises(StoreError) as refusal:
        publisher.wait(second)
    assert refusal.value.reason is Reason.STORE_LATE
    assert publisher.pool.reserved == ONE
    files.gate.set()
    publisher.stop()
    thread.join(60)
    assert (first.file, second.file) == (FileReplicaState.PUBLISHED, FileReplicaState.PUBLISHED)
    assert balanced(publisher)


@pytest.mark.parametrize("where", ["hold", "reserve", "enter"])
def test_an_interrupted_submission_leaves_nothing_behind(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C comes after one of the steps of a submission."""
    publisher = Publisher(directory, FileTier(tmp_path), LAYOUT, credits=ONE)
    (record,) = make_history(directory, 1).chunks
    owner: Any = {"hold": directory, "reserve": publisher.pool, "enter": publisher._queue}[where]
    real = getattr(owner, where)

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.submit(record)
    publisher.reclaim()
    assert (publisher.pending, record.file) == (0, FileReplicaState.FAILED)
    assert balanced(publisher)
    assert publisher.submit(record) is Submission.QUEUED
    assert publisher.run_one()
    assert record.file is FileReplicaState.PUBLISHED
    assert balanced(publisher)
