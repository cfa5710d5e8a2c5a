"""No lock of another process is waited for without end, and a file system without locks is named."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import make_chunk

from kvstrata.errors import Reason, StoreError
from kvstrata.store import Store
from kvstrata.store.catalog_database import GATE_NAME, alone_at_gate
from kvstrata.store.catalog_mirror import COUNTER_NAME, RemovalCounter
from kvstrata.store.file_lock import LockPatience, lock_file, try_lock


class Naps:
    """A clock that moves when somebody sleeps; `then` is called once, after so many naps."""

    def __init__(self, then: tuple[int, Callable[[], object]] | None = None) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        self._then = then

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps.append(seconds)
        if self._then is not None and len(self.naps) == self._then[0]:
            self._then[1]()

    def patience(self, timeout_s: float = 5.0) -> LockPatience:
        return LockPatience(timeout_s, lambda: self.now, self.sleep)


@contextlib.contextmanager
def held(path: Path, operation: int = fcntl.LOCK_EX) -> Iterator[int]:
    """As another process would hold it: through a descriptor of its own."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, operation)
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.mark.parametrize("operation", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_the_time_is_up(path: Path, operation: int) -> None:
    naps = Naps()
    with held(path), path.open() as file:
        with pytest.raises(StoreError) as refusal:
            lock_file(file.fileno(), operation, path, naps.patience(), lambda: "process 7")
        assert refusal.value.reason is Reason.STORE_BUSY
        assert f"{path} was locked for 5 s by process 7" in refusal.value.cause
        assert "try again" in refusal.value.next_step
        assert not try_lock(file.fileno(), operation, path)
    assert 5.0 <= naps.now < 5.1
    assert naps.naps[:6] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02]
    assert max(naps.naps) == 0.02


def test_a_lock_that_is_given_up_in_time_is_taken(path: Path) -> None:
    with held(path) as other, path.open() as file:
        naps = Naps((3, lambda: fcntl.flock(other, fcntl.LOCK_UN)))
        lock_file(file.fileno(), fcntl.LOCK_EX, path, naps.patience())
        assert len(naps.naps) == 3
        assert not try_lock(other, fcntl.LOCK_SH, path)


@pytest.mark.parametrize(
    ("number", "reason", "words"),
    [
        (errno.ENOLCK, Reason.STORE_IO, "gives no lock on"),
        (errno.EOPNOTSUPP, Reason.STORE_IO, "gives no lock on"),
        (errno.EIO, Reason.STORE_IO, "the disk failed while locking"),
    ],
)
def test_a_file_system_without_locks_is_a_typed_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: Reason, words: str
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path / "store")
    assert refusal.value.reason is reason
    assert words in refusal.value.cause
    assert refusal.value.next_step


def test_a_gate_that_stays_closed_is_busy(tmp_path: Path) -> None:
    """Another process builds the catalog anew and does not come to an end."""
    chunk, naps = make_chunk(), Naps()
    with Store(tmp_path / "store") as store:
        assert store.catalog is not None
        store.catalog.database._patience = naps.patience()
        with held(store.path / GATE_NAME):
            for refused in (
                lambda: store.tier.write(*chunk.arguments),
                lambda: alone_at_gate(store.path, naps.patience()).__enter__(),
            ):
                with pytest.raises(StoreError) as refusal:
                    refused()
                assert refusal.value.reason is Reason.STORE_BUSY
                assert GATE_NAME in refusal.value.cause
        assert 10.0 <= naps.now < 10.2
        assert list(store.tier.list()) == []
        store.tier.write(*chunk.arguments)
        assert store.tier.has(chunk.digest)


def test_a_removal_that_does_not_end_is_busy(tmp_path: Path) -> None:
    chunk, naps = make_chunk(), Naps()
    with Store(tmp_path / "store") as store:
        store.tier.write(*chunk.arguments)
        assert store.catalog is not None
        counter: Any = store.catalog._counter
        counter._patience = naps.patience()
        before = counter.cell[0]
        with held(store.path / COUNTER_NAME):
            with pytest.raises(StoreError) as refusal:
                store.evict([chunk.digest])
            assert refusal.value.reason is Reason.STORE_BUSY
            assert COUNTER_NAME in refusal.value.cause
        assert counter.cell[0] == before
        assert store.tier.has(chunk.digest)
        assert store.evict([chunk.digest]).removed == (chunk.digest,)


def test_a_guard_is_free_again_after_a_refusal(tmp_path: Path) -> None:
    counter = RemovalCounter(tmp_path, read_only=False, patience=Naps().patience(0.0))
    with held(tmp_path / COUNTER_NAME), pytest.raises(StoreError), counter.guard():
        raise AssertionError("it was granted")
    with counter.guard() as announce:
        announce()
    assert counter.cell[0] == 2
    counter.close()
