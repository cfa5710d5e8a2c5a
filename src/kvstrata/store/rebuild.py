"""A new catalog from the chunk files: for a store that has none yet, or whose database is damaged.

Headers say everything that a row holds but its uses. Files with a damaged header are set aside. The new database takes
the old one's place whole; generations and the authority epoch only go up.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.store.catalog_database import (
    CATALOG_NAME,
    CatalogDamaged,
    Connect,
    Database,
    alone_at_gate,
    connect_sqlite,
    translated,
)
from kvstrata.store.catalog_rows import find_row, insert_rows
from kvstrata.store.catalog_schema import SCHEMA
from kvstrata.store.file_lock import LockPatience
from kvstrata.store.manifests import named_chunks, session_manifests
from kvstrata.store.owners import FOLDER
from kvstrata.tiers.files import ChunkFile, FileTier
from kvstrata.tiers.filesystem import FileSystem, storage_error

__all__ = ["add_session", "chunk_files", "rebuild_catalog"]

Progress = Callable[[int, int], None]
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_NEW = f"{CATALOG_NAME}.new"


def rebuild_catalog(
    root: Path,
    store: str,
    files: FileSystem,
    *,
    seen: int,
    progress: Progress = lambda done, total: None,
    connect: Connect = connect_sqlite,
    now: Callable[[], float] = time.time,
    patience: LockPatience | None = None,
) -> bool:
    """Put a new catalog of the store named `store` in the place of the database with the inode `seen` (0 for none).

    Blocks until no process writes, `patience` at most, and keeps others from writing. Does nothing, and returns
    `False`, when another process was faster. progress: called with chunk files done and in all. Errors: `StoreError`.
    """
    path = root / CATALOG_NAME
    with alone_at_gate(root, patience):
        try:
            return _rebuild_alone(root, path, store, files, seen, progress, connect, now)
        except StoreError:
            raise
        except CatalogDamaged as error:
            raise StoreError(
                Reason.STORE_IO, f"the catalog of {root} cannot be built: {error}", "check the disk"
            ) from error
        except OSError as error:
            raise storage_error(error, f"building the catalog of {root}") from error


def _rebuild_alone(
    root: Path,
    path: Path,
    store: str,
    files: FileSystem,
    seen: int,
    progress: Progress,
    connect: Connect,
    now: Callable[[], float],
) -> bool:
    if path.exists() and path.stat().st_ino != seen:
        with contextlib.suppress(CatalogDamaged):
            Database(root, store, durable=False, read_only=True, connect=connect).close()
            return False
    for left in root.glob(f"{_NEW}*"):
        left.unlink()
    epoch, generation = _last_counts(path, connect)
    new = root / _NEW
    try:
        with translated(new), contextlib.closing(connect(f"{new.absolute().as_uri()}?mode=rwc")) as database:
            _make(database, root, store, files, progress, (generation, epoch), now)
    except BaseException:
        for left in root.glob(f"{_NEW}*"):
            left.unlink()
        raise
    _take_the_place(new, path, root, files)
    return True


def _make(
    database: sqlite3.Connection,
    root: Path,
    store: str,
    files: FileSystem,
    progress: Progress,
    least: tuple[int, int],
    now: Callable[[], float],
) -> None:
    """Tables and rows. least: generation and epoch that must be passed."""
    database.execute("PRAGMA synchronous = OFF")
    database.execute("PRAGMA journal_mode = MEMORY")
    database.executescript(SCHEMA)
    database.execute("BEGIN")
    started = int(max(now(), _last_change(root)) * 1e6)
    database.execute("INSERT INTO meta VALUES (?, ?, ?)", (store, max(least[0], started), max(least[1], started) + 1))
    _fill(database, root, files, progress)
    database.execute("COMMIT")
    database.execute("PRAGMA journal_mode = WAL")


def _last_change(root: Path) -> float:
    """Seconds since 1970 at which something was last written or removed, for a clock that went backward since."""
    places = [root, root / "chunks", root / FOLDER, *(path.parent for _, path in chunk_files(root))]
    times = [path.stat().st_mtime for path in dict.fromkeys(places) if path.exists()]
    return max(times, default=0.0)


def chunk_files(root: Path) -> Iterator[tuple[bytes, Path]]:
    """Digest and path of every file that has a chunk's name, in no particular order."""
    try:
        shards = [shard for shard in (root / "chunks").iterdir() if shard.is_dir()]
    except FileNotFoundError:
        return
    for shard in shards:
        for path in shard.iterdir():
            if _NAME.fullmatch(path.name) and path.name[:2] == shard.name:
                yield bytes.fromhex(path.stem), path


def _fill(database: sqlite3.Connection, root: Path, files: FileSystem, progress: Progress) -> None:
    found = sorted(chunk_files(root))
    other = (root / "store.json").stat().st_size
    aside = FileTier(root, files=files)
    for done, (chunk, path) in enumerate(found, 1):
        try:
            with ChunkFile(files, path, chunk) as file:
                insert_rows(database, [file.header], path.stat().st_mtime)
        except DamagedError as error:
            if error.reason is Reason.CHUNK_FORMAT_NEWER:
                other += path.stat().st_size
            else:
                aside.revoke(chunk)
        if not done % 64 or done == len(found):
            progress(done, len(found))
    damaged = sum(path.stat().st_size for path in (root / "damaged").glob("*"))
    database.execute("UPDATE space SET damaged_bytes = ?, other_bytes = ?", (damaged, other))
    for owner, path in session_manifests(root):
        add_session(database, owner, path)


def add_session(database: sqlite3.Connection, owner: str, path: Path) -> None:
    """Inside a transaction: the owner of a manifest that is there, with pins on those of its chunks that are."""
    added = database.execute(
        "INSERT INTO owners(name, process, pid, started, epoch) SELECT ?, '', 0, ?, authority_epoch FROM meta",
        (owner, path.stat().st_mtime),
    ).lastrowid
    database.execute("UPDATE owners SET bytes = ? WHERE id = ?", (path.stat().st_size, added))
    present = {chunk for chunk in named_chunks(path) if find_row(database, chunk) is not None}
    database.executemany("INSERT INTO pins(chunk, owner) VALUES (?, ?)", [(chunk, added) for chunk in sorted(present)])


def _last_counts(path: Path, connect: Connect) -> tuple[int, int]:
    """Epoch and generation of the database that is replaced, as far as it can be read; zero otherwise."""
    if path.exists():
        with contextlib.suppress(sqlite3.Error, TypeError, ValueError):
            old = connect(f"{path.absolute().as_uri()}?mode=ro")
            try:
                epoch, generation = old.execute("SELECT authority_epoch, directory_generation FROM meta").fetchone()
                if isinstance(epoch, int) and isinstance(generation, int) and 0 < epoch < 2**62:
                    return epoch, max(0, min(generation, 2**62))
            finally:
                old.close()
    return 0, 0


def _take_the_place(new: Path, path: Path, root: Path, files: FileSystem) -> None:
    fd = os.open(new, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    # A log that belongs to the old database would be played into the new one.
    for suffix in ("-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).unlink()
        with contextlib.suppress(FileNotFoundError):
            new.with_name(new.name + suffix).unlink()
    new.replace(path)
    files.sync_directory(root)
