"""Writes and removals of a file tier, as transactions of the catalog.

    write      intent with its bytes -> temporary file -> validated -> final name and row in one transaction
    removal    the row says DELETING, durably -> the file goes and then the row, in one transaction

Every change of a file's final name happens under the database's write lock, so that no two processes ever change it at
once, and a file that has its name without a row was left by a process that died.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.states import DURABLE_CHUNK, DurableChunkState
from kvstrata.errors import KvstrataError, Reason, StoreError
from kvstrata.store.catalog_database import CatalogDamaged, Database
from kvstrata.store.catalog_mirror import Mirror, RemovalCounter
from kvstrata.store.catalog_rows import ChunkRow, drop_row, find_row, insert_rows, layout_digest, tenant_digest
from kvstrata.store.catalog_schema import SPACE_USED
from kvstrata.tiers.chunk_format import Header
from kvstrata.tiers.files import ChunkFile, chunk_path
from kvstrata.tiers.filesystem import FileSystem, storage_error
from kvstrata.tiers.journal import Intent, WriteOutcome

__all__ = ["CatalogJournal"]

Result = TypeVar("Result")

_ZEROS = memoryview(bytes(1 << 20))
_LISTED_AT_ONCE = 4096
_OWN_INTENT = "SELECT temporary FROM intents WHERE id = ? AND process = ? AND chunk = ?"
_END_INTENT = "DELETE FROM intents WHERE id = ? AND process = ? AND chunk = ?"
_TEMPORARY = re.compile(r"[0-9a-z][-.0-9a-z]*")


class CatalogJournal:
    """`WriteJournal` of the file tier below `root`, written as the process named `process`.

    max_bytes: hard cap on the bytes of chunks, manifests, temporary and damaged files over all processes. zero_tenants:
    digests of tenants whose files are overwritten before they go. reclaim: called once when the cap is reached, to give
    back what dead processes had reserved. now: seconds since 1970. make_room: set by whoever may evict: called with the
    bytes that are missing, and the chunk that wants them, before a write is refused.
    """

    def __init__(
        self,
        database: Database,
        mirror: Mirror,
        counter: RemovalCounter,
        root: Path,
        files: FileSystem,
        process: Callable[[], str],
        *,
        max_bytes: int | None,
        zero_tenants: Collection[bytes],
        reclaim: Callable[[], object],
        now: Callable[[], float],
    ) -> None:
        self.root = root
        self._database = database
        self._mirror = mirror
        self._counter = counter
        self._files = files
        self._process = process
        self._max_bytes = max_bytes
        self._zero_tenants = frozenset(zero_tenants)
        self._reclaim = reclaim
        self._now = now
        self._unsettled: dict[int, tuple[bytes | None, Callable[[sqlite3.Connection], None]]] = {}
        self._unsettled_lock = threading.Lock()
        self.make_room: Callable[[int, ChunkIdentity | None], None] | None = None

    def published(self, chunk: bytes) -> bool:
        return self._mirror.published(chunk)

    def list(self) -> Iterator[bytes]:
        last = b""
        while True:
            query = (
                "SELECT digest FROM chunks WHERE state = 'published' AND digest > ? ORDER BY digest LIMIT ?",
                (last, _LISTED_AT_ONCE),
            )
            rows = self._database.read(lambda database, query=query: database.execute(*query).fetchall())  # type: ignore[misc]
            if not rows:
                return
            last = rows[-1][0]
            yield from (row[0] for row in rows)

    def reserve(self, intents: Sequence[Intent]) -> Sequence[int]:
        return self.reserve_bytes(
            sum([intent.nbytes for intent in intents]),
            lambda database: [self._intend(database, intent) for intent in intents],
            intents[0].identity,
            # Who leaves is decided for one newcomer at a time.
            room=len(intents) == 1,
        )

    def reserve_bytes(
        self,
        nbytes: int,
        change: Callable[[sqlite3.Connection], Result],
        identity: ChunkIdentity | None = None,
        *,
        room: bool = True,
    ) -> Result:
        """Run `change`, which adds intents of `nbytes`, unless the cap would be passed. room: others may leave for it.

        Errors: as `reserve`.
        """

        def reserve(database: sqlite3.Connection) -> Result | None:
            if self._max_bytes is not None and self._used(database) + nbytes > self._max_bytes:
                return None
            return change(database)

        self.settle_left()
        # An intent that a power failure takes leaves a temporary file that no row names, which goes just as well.
        transaction = self._database.write(reserve, lazy=True)
        if transaction is None:
            self._reclaim()
            transaction = self._database.write(reserve, lazy=True)
        if transaction is None and room and self.make_room is not None and self._max_bytes is not None:
            missing = self._database.read(self._used) + nbytes - self._max_bytes
            if missing > 0:
                self.make_room(missing, identity)
            transaction = self._database.write(reserve, lazy=True)
        if transaction is None:
            raise StoreError(
                Reason.STORE_FULL,
                f"{nbytes} bytes more would pass the cap of {self.root}: {self._database.read(self._used)} of"
                f" {self._max_bytes} bytes are used",
                "raise the cap, or remove sessions with `kvstrata store rm NAME`",
            )
        return transaction

    def publish(
        self,
        written: Sequence[tuple[int, Header]],
        place: Callable[[Sequence[bool]], Sequence[WriteOutcome]],
    ) -> Sequence[WriteOutcome]:
        with self._counter.guard() as announce:

            def change(database: sqlite3.Connection) -> Sequence[WriteOutcome]:
                rows = [find_row(database, header.identity.digest) for _, header in written]
                for index, row in enumerate(rows):
                    if row is not None and row.state is DurableChunkState.DELETING:
                        announce()
                        self._finish(database, row)
                        rows[index] = None
                pairs = list(zip(rows, written, strict=True))
                outcomes = list(
                    place(
                        [row is not None and row.layout == layout_digest(header.layout) for row, (_, header) in pairs]
                    )
                )
                new = []
                for (row, (transaction, header)), outcome in zip(pairs, outcomes, strict=True):
                    database.execute(_END_INTENT, (transaction, self._process(), header.identity.digest))
                    if row is not None and outcome is not WriteOutcome.ALREADY_PRESENT:
                        announce()
                        drop_row(database, row)
                    if row is None or outcome is not WriteOutcome.ALREADY_PRESENT:
                        new.append(header)
                insert_rows(database, new, self._now())
                return outcomes

            outcomes = self._database.write(change)
        for outcome, (_, header) in zip(outcomes, written, strict=True):
            if outcome is not WriteOutcome.ALREADY_PRESENT:
                self._mirror.forget(header.identity.digest)
        return outcomes

    def abort(self, intents: Sequence[tuple[int, ChunkIdentity]]) -> None:
        for transaction, identity in intents:
            change = partial(self._abort_one, transaction, identity)
            # What stays behind is resolved by the next write, or by whoever recovers after this process.
            with self._unsettled_lock:
                self._unsettled[transaction] = (identity.digest, change)
        self.settle_left()
        for _, identity in intents:
            self._mirror.forget(identity.digest)

    def _abort_one(self, transaction: int, identity: ChunkIdentity, database: sqlite3.Connection) -> None:
        chunk, zero = identity.digest, self._zeroes(tenant_digest(identity.context.namespace.tenant))
        # Numbers begin anew in a database that was built anew: they may be somebody else's by now.
        known = (transaction, self._process(), chunk)
        found = database.execute(_OWN_INTENT, known).fetchone()
        self.settle(database, chunk, zero=zero)
        if found is not None and zero:
            self.discard_temporary(found[0], zero=True)
        database.execute(_END_INTENT, known)

    def settle_soon(self, transaction: int, change: Callable[[sqlite3.Connection], None]) -> None:
        """Run `change`, which ends the intent `transaction` and removes no chunk, now or ahead of the next write."""
        with self._unsettled_lock:
            self._unsettled[transaction] = (None, change)
        self.settle_left()

    def settle_left(self) -> None:
        """Give back what earlier writes could not: their bytes would count against the cap while this process lives."""
        with self._unsettled_lock:
            waiting = list(self._unsettled.items())
        for transaction, (chunk, change) in waiting:
            with contextlib.suppress(KvstrataError, OSError, CatalogDamaged):
                if chunk is None:
                    self._database.write(change, frees=True)
                else:
                    with self._counter.guard() as announce:
                        announce()
                        self._database.write(change, frees=True)
                    self._mirror.forget(chunk)
                with self._unsettled_lock:
                    self._unsettled.pop(transaction, None)

    def remove(self, chunk: bytes, aside: Callable[[], bool]) -> bool:
        with self._counter.guard() as announce:

            def change(database: sqlite3.Connection) -> bool:
                row = find_row(database, chunk)
                if row is None:
                    return False
                announce()
                drop_row(database, row)
                found = self._overwritten(chunk) if self._zeroes(row.tenant) else aside()
                database.execute("UPDATE space SET damaged_bytes = ?", (_bytes_in(self.root / "damaged"),))
                return found

            found = self._database.write(change, frees=True)
        self._mirror.forget(chunk)
        return found

    def start_deleting(
        self, chunks: Collection[bytes], refuse: Callable[[sqlite3.Connection, bytes], str]
    ) -> tuple[tuple[ChunkRow, ...], dict[bytes, str]]:
        """Let the rows of `chunks` say DELETING, durably, but of those that have none or that `refuse` has words for.

        Returns the rows, and why the others were left. The chunks are no hits any more when this returns.
        """
        with self._counter.guard() as announce:

            def change(database: sqlite3.Connection) -> tuple[tuple[ChunkRow, ...], dict[bytes, str]]:
                rows: tuple[ChunkRow, ...] = ()
                refused: dict[bytes, str] = {}
                for chunk in chunks:
                    row = find_row(database, chunk)
                    if row is None:
                        refused[chunk] = ""
                    elif row.state is DurableChunkState.DELETING:
                        rows += (row,)
                    elif words := refuse(database, chunk):
                        refused[chunk] = words
                    else:
                        announce()
                        state = DURABLE_CHUNK.require(row.state, DurableChunkState.DELETING)
                        zero = self._zeroes(row.tenant)
                        database.execute(
                            "UPDATE chunks SET state = ?, zero = ? WHERE id = ?", (str(state), int(zero), row.id)
                        )
                        database.execute("INSERT INTO removed(digest) VALUES (?)", (chunk,))
                        rows += (row,)
                return rows, refused

            result = self._database.write(change, frees=True)
        for row in result[0]:
            self._mirror.forget(row.chunk)
        return result

    def finish_deleting(self, chunks: Collection[bytes]) -> int:
        """Remove files and rows of those of `chunks` whose rows say DELETING; returns the bytes of the files."""
        with self._counter.guard() as announce:

            def change(database: sqlite3.Connection) -> int:
                freed = 0
                for chunk in chunks:
                    row = find_row(database, chunk)
                    if row is not None and row.state is DurableChunkState.DELETING:
                        announce()
                        self._finish(database, row)
                        freed += row.file_bytes
                return freed

            return self._database.write(change, frees=True)

    def settle(self, database: sqlite3.Connection, chunk: bytes, *, zero: bool = False) -> None:
        """Inside a guarded transaction: make the file of `chunk` and its row agree after a write that did not end.

        A file without a row goes. A row beside a file that took the place of its own is made anew from the header.
        """
        path = chunk_path(self.root, chunk)
        row = find_row(database, chunk)
        if row is None:
            self._discard(path, zero=zero)
        elif row.state is DurableChunkState.PUBLISHED:
            with contextlib.suppress(StoreError), ChunkFile(self._files, path, chunk) as file:
                if layout_digest(file.layout) != row.layout or file.header.file_bytes != row.file_bytes:
                    drop_row(database, row)
                    insert_rows(database, [file.header], self._now())

    def discard_temporary(self, name: str, *, zero: bool) -> None:
        """Remove a temporary file of a process that died; `zero`: overwritten first, where any tenant asks for it."""
        if not _TEMPORARY.fullmatch(str(name)):
            raise CatalogDamaged(f"{name!r} is not the name of a temporary file")
        self._discard(self.root / "tmp" / name, zero=zero and bool(self._zero_tenants))

    def _intend(self, database: sqlite3.Connection, intent: Intent) -> int:
        added = database.execute(
            "INSERT INTO intents(process, chunk, temporary, bytes) VALUES (?, ?, ?, ?)",
            (self._process(), intent.identity.digest, intent.temporary, intent.nbytes),
        )
        return int(added.lastrowid or 0)

    def _finish(self, database: sqlite3.Connection, row: ChunkRow) -> None:
        DURABLE_CHUNK.require(row.state, DurableChunkState.GONE)
        self._discard(chunk_path(self.root, row.chunk), zero=row.zero)
        drop_row(database, row)

    def _overwritten(self, chunk: bytes) -> bool:
        path = chunk_path(self.root, chunk)
        found = path.is_file()
        self._discard(path, zero=True)
        return found

    def _discard(self, path: Path, *, zero: bool) -> None:
        try:
            if zero:
                self._overwrite(path)
            self._files.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, f"removing {path}") from error

    def _overwrite(self, path: Path) -> None:
        fd = self._files.open(path, os.O_RDWR)
        try:
            left, offset = self._files.size(fd), 0
            while left > offset:
                offset += self._files.pwritev(fd, [_ZEROS[: left - offset]], offset)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)

    def _zeroes(self, tenant: bytes) -> bool:
        return tenant in self._zero_tenants

    @staticmethod
    def _used(database: sqlite3.Connection) -> int:
        return int(database.execute(SPACE_USED).fetchone()[0])


def _bytes_in(folder: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total
