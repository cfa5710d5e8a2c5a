"""What must stay: pins of live processes, which expire, and of saved sessions, which do not.

A session's owner is named `session:<folder>/<sequence>`. Its row claims the sequence before the manifest is linked, so
that two processes never pin under one name.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from kvstrata.contract.states import DurableChunkState
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.store.catalog_database import Database
from kvstrata.store.catalog_journal import CatalogJournal
from kvstrata.store.catalog_rows import find_row
from kvstrata.store.manifests import SESSION_PREFIX, manifest_path, session_owner
from kvstrata.store.owners import is_alive

__all__ = ["Pins", "SessionClaim"]


@dataclass(frozen=True, slots=True)
class SessionClaim:
    """A sequence that is being saved. taken: somebody else has it. missing: chunks that are not published; nothing was
    claimed then."""

    transaction: int = 0
    owner: int = 0
    temporary: str = ""
    taken: bool = False
    missing: tuple[bytes, ...] = ()


class Pins:
    """Pins in `database`. process: this process's owner name. Every call blocks. now: seconds since 1970."""

    def __init__(
        self,
        database: Database,
        journal: CatalogJournal,
        root: Path,
        process: Callable[[], str],
        now: Callable[[], float],
    ) -> None:
        self._database = database
        self._journal = journal
        self._root = root
        self._process = process
        self._now = now

    def pin(self, owner: str, chunks: Collection[bytes], expires_unix: float | None) -> tuple[bytes, ...]:
        """Keep `chunks` from eviction; all of them, or none when some are not published: those are returned.

        owner: this process, until `expires_unix`, or a session, without expiry. Pinning again moves the expiry.
        Errors: `ConfigurationError`, `StoreError`.
        """
        session = owner.startswith(SESSION_PREFIX)
        if not session and owner != self._process():
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"owner={owner!r} is neither this process nor {SESSION_PREFIX}..."
            )
        if session != (expires_unix is None):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"expires_unix={expires_unix}: a process's pins expire, a session's do not"
            )

        def change(database: sqlite3.Connection) -> tuple[bytes, ...]:
            missing = _unpublished(database, chunks)
            if not missing:
                if session:
                    self._add_session(database, owner)
                (row,) = database.execute("SELECT id FROM owners WHERE name = ?", (owner,)).fetchone()
                _insert(database, row, chunks, expires_unix)
            return missing

        return self._database.write(change)

    def unpin(self, owner: str, chunks: Collection[bytes] | None = None) -> None:
        """Let go of `chunks`, or of everything that `owner` has pinned. What is not pinned is passed over."""

        def change(database: sqlite3.Connection) -> None:
            found = database.execute("SELECT id FROM owners WHERE name = ?", (owner,)).fetchone()
            if found is None:
                return
            if chunks is None:
                database.execute("DELETE FROM pins WHERE owner = ?", found)
                if owner.startswith(SESSION_PREFIX):
                    database.execute("DELETE FROM owners WHERE id = ?", found)
            else:
                database.executemany("DELETE FROM pins WHERE owner = ? AND chunk = ?", [(*found, c) for c in chunks])

        self._database.write(change, frees=True)

    def drop_session(self, folder: str, sequence: int) -> None:
        """Let go of what a manifest that was removed had pinned, unless another is being, or was, saved in its place.

        Of two processes that remove one session, the later must not take the pins of what was saved in between.
        """
        owner = session_owner(folder, sequence)

        def change(database: sqlite3.Connection) -> None:
            path = manifest_path(self._root, owner)
            found = database.execute(
                "SELECT id FROM owners WHERE name = ? AND id NOT IN"
                " (SELECT session FROM intents WHERE session IS NOT NULL)",
                (owner,),
            ).fetchone()
            if found is not None and (path is None or not path.is_file()):
                database.execute("DELETE FROM pins WHERE owner = ?", found)
                database.execute("DELETE FROM owners WHERE id = ?", found)

        self._journal.settle_left()
        self._database.write(change, frees=True)

    def pinned_by(self, owner: str) -> frozenset[bytes]:
        """Chunks that `owner` has pinned, expired or not."""
        query = "SELECT p.chunk FROM pins p JOIN owners o ON o.id = p.owner WHERE o.name = ?"
        return self._database.read(lambda database: frozenset(row[0] for row in database.execute(query, (owner,))))

    def reason_to_keep(self, database: sqlite3.Connection, chunk: bytes) -> str:
        """Inside a transaction: who has pinned `chunk`, in words, or the empty string."""
        rows = database.execute(
            "SELECT o.name, o.process, o.pid, p.expires FROM pins p JOIN owners o ON o.id = p.owner WHERE p.chunk = ?",
            (chunk,),
        )
        judge = self.judge()
        return next((words for row in rows if (words := judge(*row))), "")

    def judge(self) -> Callable[[str | None, str, int, float | None], str]:
        """Of a pin's owner, its process, that one's id and the expiry: why it is in force, in words, or the empty
        string. Asks about each process once, so it is good for one query; no owner is no pin."""
        alive = {self._process(): True}

        def reason(name: str | None, process: str, pid: int, expires: float | None) -> str:
            if name is None:
                return ""
            if expires is None:
                return f"it is pinned by {name}"
            if expires > self._now():
                if process not in alive:
                    alive[process] = is_alive(self._root, process)
                if alive[process]:
                    return f"it is leased by process {pid}"
            return ""

        return reason

    def claim_session(
        self, folder: str, sequence: int, chunks: Collection[bytes], temporary: str, nbytes: int
    ) -> SessionClaim:
        """Pin `chunks` for a manifest of `nbytes` that is about to be written as `temporary`.

        Errors: `StoreError` with STORE_FULL when the cap would be passed.
        """
        owner = session_owner(folder, sequence)
        outcome: list[SessionClaim] = []

        def change(database: sqlite3.Connection) -> int:
            outcome.clear()
            missing = _unpublished(database, chunks)
            if missing or database.execute("SELECT 1 FROM owners WHERE name = ?", (owner,)).fetchone():
                outcome.append(SessionClaim(taken=not missing, missing=missing))
                return -1
            row = self._add_session(database, owner)
            _insert(database, row, chunks, None)
            added = database.execute(
                "INSERT INTO intents(process, session, temporary, bytes) VALUES (?, ?, ?, ?)",
                (self._process(), row, temporary, nbytes),
            )
            outcome.append(SessionClaim(int(added.lastrowid or 0), row, temporary))
            return outcome[0].transaction

        self._journal.reserve_bytes(nbytes, change)
        return outcome[0]

    def settle_session(self, claim: SessionClaim, nbytes: int | None) -> None:
        """End what `claim_session` began: the manifest of `nbytes` is linked, or with `None` there is none.

        The manifest decides, not this: where the catalog cannot be written now it is done ahead of the next write, or
        by whoever recovers after this process; the pins hold until then.
        """

        def change(database: sqlite3.Connection) -> None:
            # Numbers begin anew in a database that was built anew, which has counted the manifests that are there.
            known = (claim.transaction, claim.temporary)
            if not database.execute("DELETE FROM intents WHERE id = ? AND temporary = ?", known).rowcount:
                return
            if nbytes is None:
                database.execute("DELETE FROM pins WHERE owner = ?", (claim.owner,))
                database.execute("DELETE FROM owners WHERE id = ?", (claim.owner,))
            else:
                database.execute("UPDATE owners SET bytes = ? WHERE id = ?", (nbytes, claim.owner))

        self._journal.settle_soon(claim.transaction, change)

    def _add_session(self, database: sqlite3.Connection, owner: str) -> int:
        database.execute(
            "INSERT OR IGNORE INTO owners(name, process, pid, started, epoch)"
            " SELECT ?, ?, ?, ?, authority_epoch FROM meta",
            (owner, self._process(), os.getpid(), self._now()),
        )
        return int(database.execute("SELECT id FROM owners WHERE name = ?", (owner,)).fetchone()[0])


def _unpublished(database: sqlite3.Connection, chunks: Collection[bytes]) -> tuple[bytes, ...]:
    missing = []
    for chunk in chunks:
        row = find_row(database, chunk)
        if row is None or row.state is not DurableChunkState.PUBLISHED:
            missing.append(chunk)
    return tuple(missing)


def _insert(database: sqlite3.Connection, owner: int, chunks: Collection[bytes], expires: float | None) -> None:
    database.executemany(
        "INSERT INTO pins(chunk, owner, expires) VALUES (?, ?, ?)"
        " ON CONFLICT(chunk, owner) DO UPDATE SET expires = excluded.expires",
        [(chunk, owner, expires) for chunk in chunks],
    )
