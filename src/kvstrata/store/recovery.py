"""What a process finds when it opens a store that others may have died in, and may be using.

The dead are known by their locks. Their intents are resolved, their leases void, deletions that they began are
finished, sessions whose manifest never came lose their pins, and the authority epoch goes up: what they held is stale.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvstrata.store.catalog_database import Database
from kvstrata.store.catalog_journal import CatalogJournal
from kvstrata.store.catalog_mirror import RemovalCounter
from kvstrata.store.manifests import manifest_path
from kvstrata.store.owners import is_alive, left_marks, remove_mark

__all__ = ["RecoveryReport", "count_aside", "recover"]


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery did. intents: writes that never ended, with the bytes given back. epoch: authority epoch now in
    force."""

    dead_processes: int = 0
    intents: int = 0
    bytes_returned: int = 0
    deletions: int = 0
    sessions: int = 0
    epoch: int = 0


def recover(database: Database, journal: CatalogJournal, counter: RemovalCounter, root: Path) -> RecoveryReport:
    """Clean up behind dead processes; blocks. Safe while others work, and when several do it at once.

    Errors: `StoreError`.
    """
    dead = [process for process in _processes(database) if not is_alive(root, process)]
    report = RecoveryReport()
    if dead:
        with counter.guard() as announce:

            def bury(current: sqlite3.Connection) -> RecoveryReport:
                announce()
                return _bury(current, journal, root, dead)

            report = database.write(bury, frees=True)
    deletions = _deleting(database)
    if deletions:
        journal.finish_deleting(deletions)
    sessions = database.write(lambda current: _drop_sessions_without_manifest(current, root), frees=True)
    named = set(_processes(database))
    for process in left_marks(root):
        if process not in named:
            remove_mark(root, process)
    database.write(lambda current: count_aside(current, root), frees=True)
    epoch = database.read(lambda current: int(current.execute("SELECT authority_epoch FROM meta").fetchone()[0]))
    return replace(report, deletions=len(deletions), sessions=report.sessions + sessions, epoch=epoch)


def count_aside(database: sqlite3.Connection, root: Path) -> None:
    """Inside a transaction: count damaged files, and temporary files that no intent names."""
    named = {row[0] for row in database.execute("SELECT temporary FROM intents")}
    strays = sum(size for name, size in _sizes(root / "tmp") if name not in named)
    damaged = sum(size for _, size in _sizes(root / "damaged"))
    if database.execute("SELECT damaged_bytes, stray_bytes FROM space").fetchone() != (damaged, strays):
        database.execute("UPDATE space SET damaged_bytes = ?, stray_bytes = ?", (damaged, strays))


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                # A file with two names has just been published and is counted as that.
                if status.st_nlink == 1:
                    yield path.name, status.st_size


def _processes(database: Database) -> list[str]:
    query = "SELECT name FROM owners WHERE name NOT LIKE 'session:%' UNION SELECT process FROM intents"
    names = database.read(lambda current: [row[0] for row in current.execute(query)])
    # A damaged row names nobody who could be alive.
    return [name for name in names if isinstance(name, str)]


def _deleting(database: Database) -> list[bytes]:
    query = "SELECT digest FROM chunks WHERE state = 'deleting'"
    return database.read(lambda current: [row[0] for row in current.execute(query) if isinstance(row[0], bytes)])


def _bury(database: sqlite3.Connection, journal: CatalogJournal, root: Path, dead: list[str]) -> RecoveryReport:
    """Inside a transaction: everything that `dead` processes left, as far as no other process was faster."""
    buried = intents = returned = sessions = 0
    for process in dead:
        found = database.execute(
            "SELECT id, chunk, session, temporary, bytes FROM intents WHERE process = ?", (process,)
        ).fetchall()
        for transaction, chunk, session, temporary, nbytes in found:
            if chunk is not None:
                journal.settle(database, chunk, zero=True)
            elif session is not None:
                sessions += not _settle_session(database, root, session)
            journal.discard_temporary(temporary, zero=chunk is not None)
            database.execute("DELETE FROM intents WHERE id = ?", (transaction,))
            intents += 1
            returned += nbytes
        own = database.execute("SELECT id FROM owners WHERE name = ?", (process,)).fetchone()
        if own is not None:
            database.execute("DELETE FROM pins WHERE owner = ?", own)
            database.execute("DELETE FROM owners WHERE id = ?", own)
            buried += 1
    if buried or intents:
        database.execute("UPDATE meta SET authority_epoch = authority_epoch + 1")
    return RecoveryReport(buried, intents, returned, sessions=sessions)


def _settle_session(database: sqlite3.Connection, root: Path, owner: int) -> bool:
    """Whether the manifest that was being written is there; its pins and its bytes count from now on, or go."""
    found = database.execute("SELECT name FROM owners WHERE id = ?", (owner,)).fetchone()
    path = manifest_path(root, found[0]) if found is not None else None
    if path is not None and path.is_file():
        database.execute("UPDATE owners SET bytes = ? WHERE id = ?", (path.stat().st_size, owner))
        return True
    _drop_owner(database, owner)
    return False


def _drop_sessions_without_manifest(database: sqlite3.Connection, root: Path) -> int:
    rows = database.execute(
        "SELECT id, name FROM owners WHERE name LIKE 'session:%'"
        " AND id NOT IN (SELECT session FROM intents WHERE session IS NOT NULL)"
    ).fetchall()
    dropped = 0
    for owner, name in rows:
        path = manifest_path(root, name)
        if path is None or not path.is_file():
            _drop_owner(database, owner)
            dropped += 1
    return dropped


def _drop_owner(database: sqlite3.Connection, owner: int) -> None:
    database.execute("DELETE FROM pins WHERE owner = ?", (owner,))
    database.execute("DELETE FROM owners WHERE id = ?", (owner,))
