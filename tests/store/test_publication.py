"""Sealed chunks reach the files behind the model's back: whole, in order, and with the truth about failures."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import LAYERS, LAYOUT, FaultyFiles, GatedFiles
from directory_parts import SIZE, make_directory, make_history, make_ids, segment_bytes

from kvstrata.contract.states import FileReplicaState, SlotState
from kvstrata.errors import Reason, StoreError
from kvstrata.store.directory import Directory
from kvstrata.store.publication import Publisher
from kvstrata.tiers.files import FileTier


@pytest.fixture
def directory() -> Directory:
    return make_directory(slots=12)


@pytest.fixture
def files() -> GatedFiles:
    return GatedFiles()


@pytest.fixture
def gated(directory: Directory, files: GatedFiles, tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(directory, FileTier(tmp_path, files=files), LAYOUT)
    publisher.start()
    yield publisher
    files.gate.set()
    publisher.stop()


def make_publisher(directory: Directory, root: Path, files: Any = None) -> Publisher:
    publisher = Publisher(directory, FileTier(root, files=files), LAYOUT)
    publisher.start()
    return publisher


def test_chunks_are_stored_with_their_bytes(directory: Directory, tmp_path: Path) -> None:
    history = make_history(directory, 2)
    publisher = make_publisher(directory, tmp_path)
    for record in history.chunks:
        publisher.submit(record)
    assert publisher.wait() >= 0
    assert publisher.pending == 0
    for index, record in enumerate(history.chunks):
        assert record.file is FileReplicaState.PUBLISHED
        with publisher.tier.open(record.digest) as file:
            for layer in range(LAYERS):
                target = bytearray(LAYOUT.segment_bytes)
                file.read_into(layer, [memoryview(target)])
                assert target == segment_bytes(make_ids(SIZE, index), layer)
    totals = publisher.totals
    assert (totals.chunks, totals.failures) == (2, 0)
    assert totals.written_bytes == 2 * LAYERS * LAYOUT.segment_bytes
    assert totals.present_bytes == 0
    assert totals.metadata_bytes > 0
    publisher.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstrata-publish"]


def test_what_is_stored_already_is_not_written_again(directory: Directory, tmp_path: Path) -> None:
    first = make_publisher(directory, tmp_path)
    first.submit(make_history(directory, 1).chunks[0])
    first.stop()
    other = make_directory()
    second = make_publisher(other, tmp_path)
    record = make_history(other, 1).chunks[0]
    second.submit(record)
    second.submit(record)
    second.wait()
    assert (second.totals.written_bytes, second.totals.present_bytes) == (0, LAYERS * LAYOUT.segment_bytes)
    second.submit(record)
    assert second.pending == 0
    second.stop()


def test_bytes_stay_in_place_while_they_are_written(directory: Directory, gated: Publisher, files: GatedFiles) -> None:
    """The request closes in the middle; the slots are nobody else's until the write has been acknowledged."""
    history = make_history(directory, 1)
    record, grants = history.chunks[0], history.chunks[0].grants
    gated.submit(record)
    assert files.waiting.wait(60)
    history.close()
    assert {directory.arena.state(grant.slot) for grant in grants if grant} <= {SlotState.RETIRED}
    make_history(directory, 3, seed=5)
    assert directory.arena.free_slots == 0
    files.gate.set()
    gated.wait()
    assert directory.arena.free_slots == LAYERS
    with gated.tier.open(record.digest) as file:
        file.verify_payload()


def test_a_chunk_is_published_only_once_written(directory: Directory, gated: Publisher, files: GatedFiles) -> None:
    record = make_history(directory, 1).chunks[0]
    gated.submit(record)
    assert files.waiting.wait(60)
    assert record.file is FileReplicaState.WRITING
    assert not record.evictable
    assert not gated.tier.has(record.digest)
    files.gate.set()
    gated.wait(record)
    assert record.evictable


def test_slots_are_let_go_before_a_chunk_becomes_evictable(directory: Directory, tmp_path: Path) -> None:
    """Else an eviction right after the publication would free nothing."""
    record = make_history(directory, 1).chunks[0]
    publisher = Publisher(directory, FileTier(tmp_path), LAYOUT)
    seen = []
    mark = directory.mark

    def marked(item: Any, state: FileReplicaState, failure: StoreError | None = None) -> None:
        mark(item, state, failure)
        if state is FileReplicaState.PUBLISHED:
            directory.evict(item, 0)
            seen.append(directory.arena.free_slots)

    directory.mark = marked  # type: ignore[method-assign]
    publisher.start()
    publisher.submit(record)
    publisher.wait()
    publisher.stop()
    assert seen == [directory.arena.slots - LAYERS + 1]


def test_two_records_of_one_chunk_are_waited_for_apart(
    directory: Directory, gated: Publisher, files: GatedFiles
) -> None:
    """A request ends while its chunk is written, and another computes the same tokens."""
    first = make_history(directory, 1)
    record = first.chunks[0]
    gated.submit(record)
    assert files.waiting.wait(60)
    first.close()
    again = make_history(directory, 1).chunks[0]
    assert again is not record
    assert again.digest == record.digest
    gated.submit(again)
    files.gate.set()
    gated.wait(again)
    assert again.file is FileReplicaState.PUBLISHED


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, Reason.STORE_FULL),
        (errno.EDQUOT, Reason.STORE_FULL),
        (errno.EIO, Reason.STORE_IO),
        (errno.EACCES, Reason.STORE_READ_ONLY),
    ],
)
def test_a_failure_is_kept_and_can_be_made_good(
    directory: Directory, tmp_path: Path, number: int, reason: Reason
) -> None:
    files = FaultyFiles(named={"pwritev": number})
    publisher = make_publisher(directory, tmp_path, files)
    record = make_history(directory, 1).chunks[0]
    publisher.submit(record)
    publisher.wait(record)
    assert record.file is FileReplicaState.FAILED
    assert record.failure is not None
    assert record.failure.reason is reason
    assert not record.evictable
    assert record.resident == LAYERS
    assert publisher.totals.failures == 1
    assert list(publisher.tier.list()) == []
    files.named.clear()
    publisher.submit(record)
    publisher.wait(record)
    assert record.file is FileReplicaState.PUBLISHED
    assert record.failure is None
    publisher.stop()


def test_a_bug_is_raised_and_not_taken_for_a_full_disk(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(directory, tmp_path)
    monkeypatch.setattr(publisher.tier, "write", lambda *_: 1 // 0)
    record = make_history(directory, 1).chunks[0]
    publisher.submit(record)
    with pytest.raises(ZeroDivisionError):
        publisher.wait(record)
    assert not record.evictable
    assert all(directory.arena.state(grant.slot) is SlotState.PUBLISHED for grant in record.grants if grant)
    publisher.stop()


def test_half_a_chunk_is_not_published(directory: Directory, tmp_path: Path) -> None:
    publisher = make_publisher(directory, tmp_path)
    record = make_history(directory, 1).chunks[0]
    directory.acquire(record.identity, on_file=True)
    directory.evict(record, 1)
    directory.mark(record, FileReplicaState.REVOKED)
    with pytest.raises(StoreError) as refusal:
        publisher.submit(record)
    assert refusal.value.reason is Reason.CHUNK_MISSING
    assert record.file is FileReplicaState.REVOKED
    publisher.stop()


def test_stopping_finishes_what_is_queued(directory: Directory, tmp_path: Path) -> None:
    publisher = make_publisher(directory, tmp_path)
    history = make_history(directory, 4)
    for record in history.chunks:
        publisher.submit(record)
    publisher.stop()
    publisher.stop()
    assert {record.file for record in history.chunks} == {FileReplicaState.PUBLISHED}


def test_without_a_thread_the_owner_writes_one_chunk_at_a_time(directory: Directory, tmp_path: Path) -> None:
    publisher = Publisher(directory, FileTier(tmp_path), LAYOUT)
    first, second = make_history(directory, 2).chunks
    assert not publisher.run_one()
    for record in (first, second):
        publisher.submit(record)
    assert publisher.run_one()
    assert (first.file, second.file) == (FileReplicaState.PUBLISHED, FileReplicaState.WRITING)
    assert publisher.run_one()
    assert not publisher.run_one()
    assert (second.file, publisher.pending) == (FileReplicaState.PUBLISHED, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_chunks_that_wait_are_written_together(
    directory: Directory, gated: Publisher, files: GatedFiles, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What fails for all of them is tried for each."""
    batches: list[int] = []
    real = gated.tier.write_all  # type: ignore[attr-defined]

    def write_all(chunks: Any) -> Any:
        batches.append(len(chunks))
        if fails and len(chunks) > 1:
            raise StoreError(Reason.STORE_FULL, "not all of them")
        return real(chunks)

    first, *others = make_history(directory, 4).chunks
    gated.submit(first)
    assert files.waiting.wait(60)
    monkeypatch.setattr(gated.tier, "write_all", write_all)
    for record in others:
        gated.submit(record)
    files.gate.set()
    gated.wait()
    assert batches == ([3, 1, 1, 1] if fails else [3])
    assert {record.file for record in (first, *others)} == {FileReplicaState.PUBLISHED}
    assert (gated.totals.chunks, gated.totals.failures) == (4, 0)
    assert set(gated.tier.list()) == {record.digest for record in (first, *others)}
    assert all(directory.arena.state(grant.slot) is SlotState.PUBLISHED for grant in first.grants if grant)


def test_a_write_that_hangs_is_late_and_is_left_behind(directory: Directory, tmp_path: Path) -> None:
    files, ticks = GatedFiles(), itertools.count(0.0, 6.0)
    tier = FileTier(tmp_path, files=files)
    publisher = Publisher(directory, tier, LAYOUT, clock=lambda: next(ticks), timeout_s=10.0)
    publisher.start()
    (thread,) = [each for each in threading.enumerate() if each.name == "kvstrata-publish"]
    (record,) = make_history(directory, 1).chunks
    publisher.submit(record)
    assert files.waiting.wait(60)
    with pytest.raises(StoreError) as refusal:
        publisher.wait(record)
    assert refusal.value.reason is Reason.STORE_LATE
    assert record.file is FileReplicaState.WRITING
    publisher.stop()
    assert thread.is_alive()
    files.gate.set()
    thread.join(60)
    assert not thread.is_alive()
    assert record.file is FileReplicaState.PUBLISHED
