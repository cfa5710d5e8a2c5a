"""Connections to `catalog.sqlite`: transactions that may run again, and what SQLite's failures mean.

One connection writes, another reads, so that a look-up never waits for a commit. When another process has put a new
database in the place of a damaged one, the next transaction goes to the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvstrata.errors import Reason, StateError, StoreError
from kvstrata.store.ballast import Ballast
from kvstrata.store.catalog_schema import APPLICATION_ID, SCHEMA_VERSION
from kvstrata.store.file_lock import LockPatience, lock_file
from kvstrata.tiers.filesystem import storage_error

__all__ = ["CATALOG_NAME", "CatalogDamaged", "Connect", "Database", "alone_at_gate", "connect_sqlite", "translated"]

CATALOG_NAME = "catalog.sqlite"
GATE_NAME = "lock.catalog"
Result = TypeVar("Result")
Connect = Callable[[str], sqlite3.Connection]
"""Opens a database by its URI in autocommit mode, for use by any thread."""

_BUSY_S = 30.0
_QUICK_CHECK_BYTES = 16 << 20
_LOG_PAGES = 4000
"""A write touches about twenty pages; SQLite's own limit of 1000 would have every fiftieth one wait for the disk."""
_DAMAGED = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
    }
)
_NO_ROOM_FOR_LOG = frozenset({sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP})
"""SQLite has a word of its own for a full disk, but not where it makes the index of its log."""
_MEANINGS = {
    sqlite3.SQLITE_FULL: (Reason.STORE_FULL, "free space on the disk or remove sessions with `kvstrata store rm NAME`"),
    sqlite3.SQLITE_BUSY: (Reason.STORE_BUSY, "another process writes to the catalog all the time; try again later"),
    sqlite3.SQLITE_LOCKED: (Reason.STORE_BUSY, "another process writes to the catalog all the time; try again later"),
    sqlite3.SQLITE_READONLY: (Reason.STORE_READ_ONLY, "check the owner and the mode of the store's directory"),
    sqlite3.SQLITE_PERM: (Reason.STORE_READ_ONLY, "check the owner and the mode of the store's directory"),
    sqlite3.SQLITE_CANTOPEN: (Reason.STORE_READ_ONLY, "check the owner and the mode of the store's directory"),
}


class CatalogDamaged(Exception):  # noqa: N818 - the thing, not the event, is named
    """The database is missing, malformed or another store's; it is rebuilt from the chunk files."""


@contextlib.contextmanager
def alone_at_gate(root: Path, patience: LockPatience | None = None) -> Iterator[None]:
    """No process commits to the catalog below `root` while this is held. Blocks, no longer than `patience`.

    Errors: `StoreError`, with STORE_BUSY when the time is up.
    """
    gate = _open_gate(root)
    try:
        lock_file(gate, fcntl.LOCK_EX, root / GATE_NAME, patience or LockPatience())
        yield
    finally:
        os.close(gate)


def _open_gate(root: Path) -> int:
    try:
        return os.open(root / GATE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise storage_error(error, f"opening {root / GATE_NAME}") from error


def connect_sqlite(uri: str) -> sqlite3.Connection:
    """`Connect` on the real library."""
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


class Database:
    """The catalog's database below `root`, which must exist and belong to the store named `store`.

    durable: a committed transaction has reached the disk. read_only: nothing is written, not even beside the file.
    heal: called when the database turns out to be damaged; puts a sound one in its place. patience: for the gate, which
    is closed while another process does that.
    Errors: `CatalogDamaged`, `StoreError`.
    """

    def __init__(
        self,
        root: Path,
        store: str,
        *,
        durable: bool,
        heal: Callable[[], None] | None = None,
        read_only: bool = False,
        connect: Connect = connect_sqlite,
        patience: LockPatience | None = None,
    ) -> None:
        self.path = root / CATALOG_NAME
        self.read_only = read_only
        self.inode = 0
        self.reopened: Callable[[sqlite3.Connection], object] = lambda connection: None
        self._ballast = Ballast(root)
        self._store = store
        self._durable = durable
        self._connect = connect
        self._heal = heal
        self._log = root / f"{CATALOG_NAME}-wal"
        self._quiet = self._full = False
        self._writing, self._reading = threading.RLock(), threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._gate: int | None = None
        self._patience = patience or LockPatience()
        if not read_only:
            self._gate = _open_gate(root)
        try:
            self._open_spending()
        except BaseException:
            self.close()
            raise

    def read(self, query: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `query` on the latest commit. Errors: `CatalogDamaged`, `StoreError`, `StateError` after `close`."""
        try:
            return self._read(query)
        except CatalogDamaged:
            self.mend()
            return self._read(query)

    def write(
        self, change: Callable[[sqlite3.Connection], Result], *, lazy: bool = False, frees: bool = False
    ) -> Result:
        """Run `change` in one transaction, alone among all processes; what it raises undoes it.

        lazy: it need not have reached the disk before it is followed by one that must. frees: it gives room back, and
        may spend the ballast where the disk has none left. It runs again then, and when the database turned out to be
        damaged and another took its place. Errors: as `read`.
        """
        with self._writing:
            while True:
                try:
                    return self._write_or_mend(change, lazy)
                except StoreError as error:
                    if not (frees and error.reason is Reason.STORE_FULL and self._ballast.spend()):
                        raise

    def _write_or_mend(self, change: Callable[[sqlite3.Connection], Result], lazy: bool) -> Result:
        try:
            return self._write(change, lazy)
        except CatalogDamaged:
            self.mend()
            return self._write(change, lazy)

    def _read(self, query: Callable[[sqlite3.Connection], Result]) -> Result:
        with self._reading:
            if self._reader is None:
                raise _closed(self.path)
            if not self._moved():
                with translated(self.path):
                    return query(self._reader)
        with self._writing:
            self._reopen()
        return self._read(query)

    def _write(self, change: Callable[[sqlite3.Connection], Result], lazy: bool) -> Result:
        if self._gate is None or self._writer is None:
            raise _closed(self.path)
        # Whoever puts another database in the place of this one holds the gate alone: no commit goes to a dead file.
        lock_file(self._gate, fcntl.LOCK_SH, self.path.with_name(GATE_NAME), self._patience)
        try:
            if self._moved():
                self._reopen()
            with translated(self.path):
                self._sync(self._writer, lazy)
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    result = change(self._writer)
                    self._writer.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):
                        if self._writer.in_transaction:
                            self._writer.execute("ROLLBACK")
                    raise
            return result
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def mend(self) -> None:
        """A reader cannot heal; what it looks at may have been replaced or written to since it was opened."""
        with self._writing:
            if self._heal is not None:
                self._heal()
            self._reopen()

    def check(self) -> None:
        """Read the whole database for structural damage; blocks. Errors: `CatalogDamaged`."""

        with self._reading:
            self._quick_check()

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        with self._writing, self._reading:
            self._let_go()
            if self._gate is not None:
                os.close(self._gate)
                self._gate = None

    def _reopen(self) -> None:
        with self._reading:
            self._let_go()
            self._open_spending()
        self._report_reopened()

    def _report_reopened(self) -> None:
        if self._writer is not None:
            self.reopened(self._writer)

    def _sync(self, writer: sqlite3.Connection, lazy: bool) -> None:
        """A commit that must last syncs the whole log, those before it included."""
        full = self._durable and not lazy
        if full != self._full:
            writer.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
            self._full = full

    def _moved(self) -> bool:
        try:
            moved = self.path.stat().st_ino != self.inode
        except OSError as error:
            raise CatalogDamaged(f"{self.path} is gone") from error
        return moved or (self._quiet and self._log.exists())

    def _open_spending(self) -> None:
        """Whoever cannot open a store cannot remove anything from it."""
        while True:
            try:
                return self._open()
            except StoreError as error:
                self._let_go()
                if self.read_only or error.reason is not Reason.STORE_FULL or not self._ballast.spend():
                    raise

    def _let_go(self) -> None:
        for connection in (self._writer, self._reader):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
        self._writer = self._reader = None

    def _open(self) -> None:
        try:
            status = self.path.stat()
        except OSError as error:
            raise CatalogDamaged(f"{self.path} is missing") from error
        self.inode = status.st_ino
        self._full = False
        with translated(self.path):
            self._reader = self._opened()
            if not self.read_only:
                self._writer = self._opened()
        if status.st_size <= _QUICK_CHECK_BYTES:
            self._quick_check()

    def _quick_check(self) -> None:
        if self._reader is None:
            raise _closed(self.path)
        with translated(self.path):
            found = self._reader.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise CatalogDamaged(f"{self.path}: {found}")

    def _opened(self) -> sqlite3.Connection:
        place = self.path.absolute().as_uri()
        if not self.read_only:
            connection = self._connect(f"{place}?mode=rw")
        else:
            # Without a log beside it nobody is writing, and without permission SQLite cannot make one.
            self._quiet = not self._log.exists()
            connection = self._connect(f"{place}?mode=ro{'&immutable=1' if self._quiet else ''}")
        try:
            self._configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self, connection: sqlite3.Connection) -> None:
        identity = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if identity != APPLICATION_ID or not 1 <= version <= SCHEMA_VERSION:
            raise CatalogDamaged(f"application id {identity:#x}, version {version}")
        found = connection.execute("SELECT store FROM meta").fetchall()
        if found != [(self._store,)]:
            raise CatalogDamaged(f"it belongs to another store: {found!r}")
        if not self.read_only:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """What SQLite says of the database at `path` becomes `CatalogDamaged` or `StoreError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise CatalogDamaged(f"{path}: {error}") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        primary = None if code is None else code & 0xFF
        undecodable = code is None and isinstance(error, (sqlite3.OperationalError, sqlite3.DataError))
        if primary in _DAMAGED or undecodable or (primary == sqlite3.SQLITE_ERROR and "no such" in str(error)):
            raise CatalogDamaged(f"{path}: {error}") from error
        if code in _NO_ROOM_FOR_LOG:
            primary = sqlite3.SQLITE_FULL
        reason, step = _MEANINGS.get(primary or 0, (Reason.STORE_IO, "check the disk and the system log"))
        raise StoreError(reason, f"the catalog {path} refuses: {error}", step) from error


def _closed(path: Path) -> StateError:
    return StateError(Reason.CLOSED, f"the catalog {path} is closed", "open the store again")
