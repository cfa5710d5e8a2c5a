"""A write that fails at any step leaves the whole chunk or nothing, and never what it reserved."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from chunks_and_faults import Crash, FaultyFiles, make_chunk, tree

from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.files import FileTier, WriteOutcome

CHUNK = make_chunk()
REASONS = {
    errno.ENOSPC: Reason.STORE_FULL,
    errno.EDQUOT: Reason.STORE_FULL,
    errno.EIO: Reason.STORE_IO,
    errno.EROFS: Reason.STORE_READ_ONLY,
    errno.EACCES: Reason.STORE_READ_ONLY,
}


def calls_of_a_write(root: Path, durable: bool) -> list[str]:
    files = FaultyFiles()
    FileTier(root, files=files, durable=durable).write(*CHUNK.arguments)
    return files.calls


def whole_or_absent(root: Path) -> bool:
    """Whether the chunk is visible; fails when it is visible and not whole."""
    tier = FileTier(root)
    if not tier.has(CHUNK.digest):
        return False
    with tier.open(CHUNK.digest) as file:
        file.verify_payload()
    return True


@pytest.mark.parametrize("number", list(REASONS))
@pytest.mark.parametrize("durable", [False, True])
def test_each_system_call_may_fail(tmp_path: Path, number: int, durable: bool) -> None:
    calls = calls_of_a_write(tmp_path / "count", durable)
    assert len(calls) > 12
    last = len(calls) - 1
    assert calls[last] == "unlink"
    for index, call in enumerate(calls[:last]):
        root = tmp_path / str(index)
        tier = FileTier(root, files=FaultyFiles(plan={index: number}), durable=durable)
        with pytest.raises(StoreError) as refusal:
            tier.write(*CHUNK.arguments)
        assert refusal.value.reason is REASONS[number], (index, call)
        assert refusal.value.next_step
        assert tree(root / "tmp") == {}, (index, call)
        published = "link" in calls[:index]
        assert whole_or_absent(root) == published, (index, call)
        retried = FileTier(root, durable=durable).write(*CHUNK.arguments)
        assert retried.outcome is (WriteOutcome.ALREADY_PRESENT if published else WriteOutcome.WRITTEN)


@pytest.mark.parametrize("durable", [False, True])
def test_the_process_may_end_between_any_two_steps(tmp_path: Path, durable: bool) -> None:
    calls = calls_of_a_write(tmp_path / "count", durable)
    for index, call in enumerate(calls):
        root = tmp_path / str(index)
        with pytest.raises(Crash):
            FileTier(root, files=FaultyFiles(plan={index: "crash"}), durable=durable).write(*CHUNK.arguments)
        assert whole_or_absent(root) == ("link" in calls[:index]), (index, call)
        FileTier(root).write(*CHUNK.arguments)
        assert whole_or_absent(root)


def test_a_full_disk_is_known_before_anything_is_copied(tmp_path: Path) -> None:
    files = FaultyFiles(named={"allocate": errno.ENOSPC})
    with pytest.raises(StoreError) as refusal:
        FileTier(tmp_path, files=files).write(*CHUNK.arguments)
    assert refusal.value.reason is Reason.STORE_FULL
    assert "kvstrata store rm" in refusal.value.next_step
    assert "pwritev" not in files.calls


def test_a_write_of_no_bytes_does_not_spin(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.pwritev = lambda fd, buffers, offset: 0  # type: ignore[attr-defined]
    with pytest.raises(StoreError) as refusal:
        FileTier(tmp_path, files=files).write(*CHUNK.arguments)
    assert refusal.value.reason is Reason.STORE_IO
    assert tree(tmp_path) == {}


def test_a_disk_that_lies_is_found_out_before_publication(tmp_path: Path) -> None:
    """The system says that everything was written, and the bytes are others."""
    files = FaultyFiles()
    real = files.pwritev

    def lie(fd: int, buffers: list[memoryview], offset: int) -> int:
        header, *rows = buffers
        return int(real(fd, [header, *(memoryview(bytes(each.nbytes)) for each in rows)], offset))

    files.pwritev = lie  # type: ignore[attr-defined]
    with pytest.raises(StoreError) as refusal:
        FileTier(tmp_path, files=files).write(*CHUNK.arguments)
    assert refusal.value.reason is Reason.STORE_IO
    assert tree(tmp_path) == {}


def test_a_write_that_lost_the_race_keeps_the_winner(tmp_path: Path) -> None:
    files = FaultyFiles()
    real = files.link

    def beaten(source: Path, target: Path) -> None:
        FileTier(tmp_path).write(*CHUNK.arguments)
        real(source, target)

    files.link = beaten  # type: ignore[attr-defined]
    assert FileTier(tmp_path, files=files).write(*CHUNK.arguments).outcome is WriteOutcome.ALREADY_PRESENT
    assert whole_or_absent(tmp_path)
    assert tree(tmp_path / "tmp") == {}
