"""A disk that is full under the catalog itself: it is read, emptied and refused, and no error of SQLite gets out."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from chunks_and_faults import FaultyFiles, make_chunk

from kvstrata.errors import Reason, StoreError
from kvstrata.sessions import SessionStore
from kvstrata.store import CollectOutcome, Store
from kvstrata.store.ballast import BALLAST_BYTES, BALLAST_NAME, Ballast


class FullDisk:
    """Connections that cannot commit while it is `on` and the ballast at `root` is heavier than `weight` bytes."""

    def __init__(self, root: Path, weight: int = 0) -> None:
        self.on = False
        self.code = sqlite3.SQLITE_FULL
        self._ballast = root / BALLAST_NAME
        self._weight = weight

    def check(self) -> None:
        size = self._ballast.stat().st_size if self._ballast.exists() else 0
        room = self._weight and size <= self._weight
        if self.on and not room:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = self.code
            raise error

    def connect(self, uri: str) -> sqlite3.Connection:
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *rest: object) -> sqlite3.Cursor:  # type: ignore[override]
                if "immutable" not in uri and (statement == "COMMIT" or statement.startswith("PRAGMA journal")):
                    disk.check()
                return super().execute(statement, *rest)  # type: ignore[arg-type]

            def executescript(self, script: str) -> sqlite3.Cursor:
                disk.check()
                return super().executescript(script)

        return sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, factory=Connection, timeout=1
        )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Store(tmp_path / "store") as store:
        for seed in range(3):
            store.tier.write(*make_chunk(seed).arguments)
        first = make_chunk(0)
        SessionStore(store).save("talk", first.identity.context, first.identity.token_ids, [first.digest], 128)
    return tmp_path / "store"


def test_it_is_laid_when_a_store_is_opened_and_spent_in_halves(tmp_path: Path, root: Path) -> None:
    ballast = Ballast(root)
    assert (root / BALLAST_NAME).stat().st_size == BALLAST_BYTES
    sizes = []
    while ballast.spend():
        sizes.append((root / BALLAST_NAME).stat().st_size if (root / BALLAST_NAME).exists() else 0)
    assert sizes == [256 << 10, 128 << 10, 64 << 10, 0]
    Store(root).close()
    assert (root / BALLAST_NAME).stat().st_size == BALLAST_BYTES
    assert not Ballast(tmp_path / "nowhere").spend()


def test_a_disk_without_room_to_spare_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    few = os.statvfs_result((*real[:4], 4 * BALLAST_BYTES // real.f_frsize, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    Ballast(tmp_path).lay()
    assert (tmp_path / BALLAST_NAME).stat().st_size == 0


def test_a_session_is_removed_from_a_full_disk(root: Path) -> None:
    disk = FullDisk(root, weight=BALLAST_BYTES // 2)
    with Store(root, connect=disk.connect) as store:
        disk.on = True
        with pytest.raises(StoreError) as refusal:
            store.tier.write(*make_chunk(9).arguments)
        assert refusal.value.reason is Reason.STORE_FULL
        assert (root / BALLAST_NAME).stat().st_size == BALLAST_BYTES
        removed = SessionStore(store).remove("talk")
        assert removed.collected.outcome is CollectOutcome.DONE
        assert removed.collected.chunks_removed == 3
        disk.on = False
        assert store.audit() == []


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE])
def test_what_is_stored_is_read_from_a_disk_that_has_no_room_for_a_log(root: Path, code: int) -> None:
    disk = FullDisk(root)
    disk.on, disk.code = True, code
    with Store(root, connect=disk.connect) as store:
        assert store.read_only
        assert all(verdict.sound for verdict in store.verify())
        assert SessionStore(store).load("talk").frontier == 128
        assert store.collect(()).reason is Reason.STORE_FULL
        with pytest.raises(StoreError) as refusal:
            store.require_writable()
        assert refusal.value.reason is Reason.STORE_FULL
    with pytest.raises(StoreError) as refusal:
        Store(root, connect=disk.connect, read_only=False)
    assert refusal.value.reason is Reason.STORE_FULL


def test_a_new_store_and_a_lost_catalog_are_refused_on_a_full_disk(tmp_path: Path, root: Path) -> None:
    disk = FullDisk(root)
    disk.on = True
    (root / "catalog.sqlite").unlink()
    for place in (tmp_path / "new", root):
        with pytest.raises(StoreError) as refusal:
            Store(place, connect=disk.connect)
        assert refusal.value.reason is Reason.STORE_FULL
        assert not list(place.glob("catalog.sqlite.new*"))
    disk.on = False
    with Store(root, connect=disk.connect) as store:
        assert len(list(store.verify())) == 3


def test_chunks_are_used_without_a_lease_while_the_disk_is_full(root: Path) -> None:
    disk = FullDisk(root)
    known, gone = make_chunk(0).digest, make_chunk(77).digest
    with Store(root, connect=disk.connect) as store:
        assert store.catalog is not None
        disk.on = True
        assert store.in_use.hold([known, gone]) == (gone,)
        assert known in store.in_use
        assert gone not in store.in_use
        disk.on = False
        assert store.catalog.pins.pinned_by(store.catalog.process) == frozenset()
        assert store.in_use.hold([known]) == ()
        assert store.catalog.pins.pinned_by(store.catalog.process) == {known}


def test_bytes_that_a_full_disk_kept_reserved_come_back_with_the_next_write(root: Path) -> None:
    files, disk = FaultyFiles(), FullDisk(root)
    with Store(root, connect=disk.connect, files=files, max_bytes=10_000_000) as store:
        assert store.catalog is not None

        def fill(fd: int, length: int) -> None:
            disk.on = True
            raise OSError(errno.ENOSPC, "full")

        files.allocate = fill  # type: ignore[attr-defined]
        with pytest.raises(StoreError) as refusal:
            store.tier.write(*make_chunk(9).arguments)
        assert refusal.value.reason is Reason.STORE_FULL
        assert store.catalog.figures().reserved_bytes > 0
        disk.on = False
        del files.allocate  # type: ignore[attr-defined]
        store.tier.write(*make_chunk(10).arguments)
        assert store.catalog.figures().reserved_bytes == 0
        assert store.audit() == []


def test_a_full_disk_never_kills_whoever_counts_a_removal(root: Path) -> None:
    """A store into a mapped hole of a file is answered by SIGBUS there; a write is refused."""
    child = """
import resource, sys
from kvstrata.errors import StoreError
from kvstrata.store import Store
store = Store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    with store.catalog.removals() as announce:
        announce()
except StoreError as error:
    print(error.reason)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", child, str(root)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "store_full"), done.stderr
