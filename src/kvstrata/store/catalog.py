"""The directory of a durable tier: SQLite (WAL) behind a compact mirror in memory.

    catalog.sqlite      rows of published chunks, writes under way, owners, pins
    catalog.removals    eight bytes that tell every process when to forget (`catalog_mirror`)
    owners/             one locked file for each process (`owners`)
    lock.catalog        held alone while a damaged database is rebuilt
    catalog.ballast     room that is given up when the disk is full (`ballast`)

Published means: the row says so. A file without a row is no hit.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.errors import KvstrataError, Reason, StoreError
from kvstrata.store.ballast import Ballast
from kvstrata.store.catalog_database import CATALOG_NAME, CatalogDamaged, Connect, Database, connect_sqlite
from kvstrata.store.catalog_journal import CatalogJournal
from kvstrata.store.catalog_mirror import Lookup, Mark, Mirror, MirrorEntry, RemovalCounter
from kvstrata.store.catalog_pins import Pins
from kvstrata.store.catalog_rows import namespace_digest, packed_tokens, tenant_digest
from kvstrata.store.catalog_schema import SPACE_USED
from kvstrata.store.file_lock import LockPatience
from kvstrata.store.owners import ProcessMark
from kvstrata.store.rebuild import rebuild_catalog
from kvstrata.store.recovery import RecoveryReport, count_aside, recover
from kvstrata.tiers.filesystem import FileSystem, storage_error

__all__ = ["Candidate", "Catalog", "CatalogFigures", "Lookup"]

MIRROR_BYTES = 256 << 20
_TOUCHES_HELD = 4096


@dataclass(frozen=True, slots=True)
class Candidate:
    """A published chunk. file_bytes: what removing it frees. Times are seconds since 1970."""

    chunk: bytes
    parent: bytes
    file_bytes: int
    created: float
    last_used: float
    uses: int


@dataclass(frozen=True, slots=True)
class CatalogFigures:
    """What the catalog counts. Bytes are file sizes, headers and padding included; used_bytes is what a cap is held
    against: chunks, reservations, manifests, damaged and other files."""

    chunks: int
    chunk_bytes: int
    reserved_bytes: int
    used_bytes: int
    sessions: int
    pins: int
    generation: int
    epoch: int


class Catalog:
    """The catalog of the store named `store` at `root`, open until `close`. Safe for several threads and processes.

    durable: a committed row has reached the disk. read_only: nothing below `root` is written. max_bytes, zero_tenants:
    see `CatalogJournal`; tenants by name. progress: called with chunk files done and in all while a catalog is built.
    mirror_bytes: most memory for remembered entries, token ids included. connect, now: injected. patience: for locks of
    other processes; `LockPatience` says how long by default.

    Attributes:
        journal: what a `FileTier` writes through.
        mirror: what is remembered of it; `mirror.lookup` is `lookup`.
        process: this process's owner name.
        recovered: what opening cleaned up.
        rebuilt: whether opening, or a call since, built the database anew.

    Errors: `StoreError`; read only, `CatalogDamaged` where there is no sound database.
    """

    def __init__(
        self,
        root: Path,
        store: str,
        files: FileSystem,
        *,
        durable: bool = False,
        read_only: bool = False,
        max_bytes: int | None = None,
        zero_tenants: Collection[str] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
        mirror_bytes: int = MIRROR_BYTES,
        connect: Connect = connect_sqlite,
        now: Callable[[], float] = time.time,
        patience: LockPatience | None = None,
    ) -> None:
        self.root = root
        self.rebuilt = False
        self.recovered = RecoveryReport()
        self._store = store
        self._files = files
        self._progress = progress
        self._connect = connect
        self._now = now
        self._patience = patience
        self._touched: dict[bytes, tuple[float, int]] = {}
        self._touching = threading.Lock()
        self._ballast = Ballast(root)
        self._mark: ProcessMark | None = None
        self._counter: RemovalCounter | None = None
        self._database = self._opened(durable, read_only)
        try:
            if not read_only:
                self._mark = ProcessMark(root)
                self._database.reopened = self._register
                self._database.write(self._register, frees=True)
            self._counter = RemovalCounter(root, read_only=read_only, patience=patience)
            self.mirror = Mirror(self._counter, self._fetch, self._removed_since, mirror_bytes)
            self.journal = CatalogJournal(
                self._database,
                self.mirror,
                self._counter,
                root,
                files,
                lambda: self.process,
                max_bytes=max_bytes,
                zero_tenants=[tenant_digest(tenant) for tenant in zero_tenants],
                reclaim=self.recover,
                now=now,
            )
            self.pins = Pins(self._database, self.journal, root, lambda: self.process, now)
            self.process = self._mark.name if self._mark else ""
            if not read_only:
                self.recovered = self.recover()
                self._ballast.lay()
        except StoreError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise storage_error(error, f"opening the catalog of {root}") from error
        except BaseException:
            self.close()
            raise
        self.lookup = self.mirror.lookup

    def find(self, identity: ChunkIdentity, generation: int | None = None) -> Lookup:
        """As `lookup(chunk, context, namespace, packed token ids, generation)`, which a hot path calls with digests
        that it computes once. Errors: `StoreError`."""
        context = identity.context
        return self.mirror.lookup(
            identity.digest,
            context.digest,
            namespace_digest(context.namespace),
            packed_tokens(identity.token_ids),
            generation,
        )

    def pin(self, owner: str, chunks: Collection[bytes], expires_unix: float | None) -> tuple[bytes, ...]:
        """See `Pins.pin`."""
        return self.pins.pin(owner, chunks, expires_unix)

    def unpin(self, owner: str, chunks: Collection[bytes] | None = None) -> None:
        """See `Pins.unpin`."""
        self.pins.unpin(owner, chunks)

    def touch(self, chunks: Iterable[bytes]) -> None:
        """Note that `chunks` were used now. Held back and written together: by the next `candidates`, `close`, or when
        4096 chunks wait. Does not block otherwise."""
        now = self._now()
        with self._touching:
            for chunk in chunks:
                self._touched[chunk] = (now, self._touched.get(chunk, (0.0, 0))[1] + 1)
            full = len(self._touched) >= _TOUCHES_HELD
        if full:
            self.flush()

    def flush(self) -> None:
        """Write held touches, unless the disk is full. Blocks. Errors: `StoreError`."""
        with self._touching:
            touched, self._touched = self._touched, {}
        if touched:
            rows = [(now, uses, chunk) for chunk, (now, uses) in touched.items()]
            statement = "UPDATE chunks SET last_used = MAX(last_used, ?), uses = uses + ? WHERE digest = ?"
            try:
                self._database.write(lambda database: database.executemany(statement, rows))
            except StoreError as error:
                # A full disk must not stop what would make room on it: these uses are not counted.
                if error.reason is not Reason.STORE_FULL:
                    raise

    def candidates(self, limit: int = 1000) -> list[Candidate]:
        """Published chunks without a pin in force, those first that were not used for longest. Blocks."""
        return list(itertools.islice((each for each, pinned in self.published() if not pinned), limit))

    def published(self) -> list[tuple[Candidate, str]]:
        """All published chunks, those first that were not used for longest, each with who has pinned it, in words, or
        the empty string. Blocks."""
        self.flush()

        def query(database: sqlite3.Connection) -> list[tuple[Candidate, str]]:
            judge = self.pins.judge()
            found: dict[bytes, tuple[Candidate, str]] = {}
            for chunk, *row in database.execute(
                "SELECT c.digest, c.parent, c.file_bytes, c.created, c.last_used, c.uses,"
                " o.name, o.process, o.pid, p.expires"
                " FROM chunks c LEFT JOIN pins p ON p.chunk = c.digest LEFT JOIN owners o ON o.id = p.owner"
                " WHERE c.state = 'published' ORDER BY c.last_used, c.id"
            ):
                candidate, words = found.get(chunk) or (Candidate(chunk, *row[:5]), "")
                found[chunk] = (candidate, words or judge(*row[5:]))
            return list(found.values())

        return self._database.read(query)

    def recover(self) -> RecoveryReport:
        """Clean up behind dead processes now. Blocks. See `recover`."""
        assert self._counter is not None
        return recover(self._database, self.journal, self._counter, self.root)

    def count_aside(self) -> None:
        """Count damaged and stray temporary files anew, after somebody removed some. Blocks. Errors: `StoreError`."""
        self._database.write(lambda database: count_aside(database, self.root), frees=True)

    def figures(self) -> CatalogFigures:
        """Counts and bytes. Blocks for one query."""

        def query(database: sqlite3.Connection) -> CatalogFigures:
            chunks, size, reserved = database.execute(
                "SELECT chunks, chunk_bytes, reserved_bytes FROM space"
            ).fetchone()
            generation, epoch = database.execute("SELECT directory_generation, authority_epoch FROM meta").fetchone()
            return CatalogFigures(
                chunks=chunks,
                chunk_bytes=size,
                reserved_bytes=reserved,
                used_bytes=database.execute(SPACE_USED).fetchone()[0],
                sessions=database.execute("SELECT COUNT(*) FROM owners WHERE name LIKE 'session:%'").fetchone()[0],
                pins=database.execute("SELECT COUNT(*) FROM pins").fetchone()[0],
                generation=generation,
                epoch=epoch,
            )

        return self._database.read(query)

    @property
    def database(self) -> Database:
        """For the catalog's own neighbours: verification and repair."""
        return self._database

    def removals(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """See `RemovalCounter.guard`."""
        assert self._counter is not None
        return self._counter.guard()

    def rebuild(self) -> None:
        """Build the database anew from the chunk files. Blocks. Errors: `StoreError`."""
        self._database.mend()

    def close(self) -> None:
        """Write what is held, give leases back and let go. Idempotent."""
        try:
            if self._mark is not None:
                # Without this the next one who opens the store finds that the lock is gone, and does the same.
                with contextlib.suppress(KvstrataError, CatalogDamaged):
                    self.flush()
                    self._database.write(self._leave)
        finally:
            self._database.close()
            if self._mark is not None:
                self._ballast.lay()
            if self._counter is not None:
                self._counter.close()
            if self._mark is not None:
                self._mark.release()
                self._mark = None

    def _opened(self, durable: bool, read_only: bool) -> Database:
        def open_database() -> Database:
            return Database(
                self.root,
                self._store,
                durable=durable,
                read_only=read_only,
                heal=None if read_only else self._rebuild,
                connect=self._connect,
                patience=self._patience,
            )

        try:
            return open_database()
        except CatalogDamaged:
            if read_only:
                raise
            self._rebuild()
            return open_database()

    def _rebuild(self) -> None:
        path = self.root / CATALOG_NAME
        seen = path.stat().st_ino if path.exists() else 0
        self.rebuilt |= rebuild_catalog(
            self.root,
            self._store,
            self._files,
            seen=seen,
            progress=self._progress,
            connect=self._connect,
            now=self._now,
            patience=self._patience,
        )

    def _register(self, database: sqlite3.Connection) -> None:
        assert self._mark is not None
        database.execute(
            "INSERT OR IGNORE INTO owners(name, process, pid, started, epoch)"
            " SELECT ?, ?, ?, ?, authority_epoch FROM meta",
            (self._mark.name, self._mark.name, os.getpid(), self._now()),
        )

    def _leave(self, database: sqlite3.Connection) -> None:
        assert self._mark is not None
        (own,) = database.execute("SELECT id FROM owners WHERE name = ?", (self._mark.name,)).fetchone() or (0,)
        database.execute("DELETE FROM pins WHERE owner = ?", (own,))
        database.execute("DELETE FROM owners WHERE id = ?", (own,))

    def _fetch(self, chunk: bytes) -> MirrorEntry | Lookup:
        def query(database: sqlite3.Connection) -> tuple[object, ...] | None:
            found: tuple[object, ...] | None = database.execute(
                "SELECT c.state, c.replica_generation, c.tokens, x.digest, x.namespace"
                " FROM chunks c JOIN contexts x ON x.id = c.context WHERE c.digest = ?",
                (chunk,),
            ).fetchone()
            return found

        found = self._database.read(query)
        if found is None:
            return Lookup.MISS
        state, generation, tokens, context, namespace = found
        if state != "published":
            return Lookup.DELETED
        well_formed = (
            isinstance(generation, int)
            and isinstance(tokens, bytes)
            and isinstance(context, bytes)
            and isinstance(namespace, bytes)
        )
        if not well_formed:
            return Lookup.MISS
        return MirrorEntry((context, namespace), generation, tokens)  # type: ignore[arg-type]

    def _removed_since(self, mark: Mark | None) -> tuple[Iterable[bytes] | None, Mark]:
        def query(database: sqlite3.Connection) -> tuple[Iterable[bytes] | None, Mark]:
            first, last = database.execute("SELECT MIN(id), MAX(id) FROM removed").fetchone()
            now = (self._database.inode, last or 0)
            if mark is None or mark[0] != now[0]:
                return None, now
            if first is not None and first > mark[1] + 1:
                return None, now
            rows = database.execute("SELECT digest FROM removed WHERE id > ?", (mark[1],)).fetchall()
            return [row[0] for row in rows], now

        return self._database.read(query)
