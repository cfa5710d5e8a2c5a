"""A store: the directory in which chunks and sessions outlive the process.

    store.json      marker, format and name
    chunks/ tmp/ damaged/     the file tier (`kvstrata.tiers.files`)
    catalog.*, owners/        its directory (`kvstrata.store.catalog`)
    sessions/       manifests (`kvstrata.sessions`)
    lock, lock.collect        who uses it (`kvstrata.store.lock`)

Any number of processes may open a store at once. Chunks are shared by everything that refers to them. `evict` removes
what nobody has pinned, at any time; `collect` removes what no session needs, for an opener that is alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstrata.errors import ConfigurationError, Reason, StateError, StoreError
from kvstrata.store.admission import AdmissionFilter
from kvstrata.store.audit import Finding, audit, repair
from kvstrata.store.catalog import Catalog
from kvstrata.store.catalog_database import CATALOG_NAME, CatalogDamaged, Connect, alone_at_gate, connect_sqlite
from kvstrata.store.collection import (
    CollectOutcome,
    CollectResult,
    StoreUsage,
    measure,
    remove_strays,
    remove_temporaries,
)
from kvstrata.store.deletion import EvictResult, evict
from kvstrata.store.eviction import PolicyConfig, make_policy
from kvstrata.store.lock import StoreLock
from kvstrata.store.marker import STORE_FORMAT, Marker, prepare, write_marker
from kvstrata.store.room import Room
from kvstrata.store.service_ledger import ServiceLedger
from kvstrata.store.uses import ChunksInUse
from kvstrata.store.verification import ChunkVerdict, verify_chunks
from kvstrata.tiers.files import FileSystem, FileTier, OsFiles
from kvstrata.tiers.filesystem import storage_error
from kvstrata.tiers.interface import ChunkTier

__all__ = ["Store"]


class Store:
    """The store at `path`, open until `close`.

    create: make it when the path does not exist or is an empty directory. durable: see `FileTier`. read_only: `True`
    never writes; `False` insists on writing; `None` writes where the system permits it and the disk has room for the
    catalog's log, and `read_only` says which it was. max_bytes: hard cap on the bytes of chunks, manifests, temporary
    and damaged files over all processes; the catalog itself comes on top. retention: under a cap, which chunks leave
    first when no session and no open request needs them: an eviction policy, or `None` to refuse instead. admission:
    let a chunk that would displace others be written only if it was asked for more often. zero_tenants: tenants whose
    files are overwritten with zeros before they go. progress: called with chunk files done and in all while a catalog
    is built, for a store that has none. wait_s: longest wait for another process that deletes. wrap_tier: puts a tier
    of the caller's, such as `ThrottledTier` or `FaultyTier`, between the files and whoever stores and reads chunks;
    verification and collection look at the files themselves.

    Attributes:
        path: its directory.
        tier: where chunks are stored and read: `file_tier`, or what `wrap_tier` made of it.
        file_tier: the `FileTier` of its chunks.
        rates: how fast its tiers were, as measured by this process.
        in_use: chunks that open requests of this process rely on.
        admission: the filter that judges newcomers, where there is one.
        room: what makes room under the cap, where there is one.
        catalog: its directory of chunks; `None` where it may only be read and has no sound one.
        read_only: whether writes are refused.
        files: the system calls in use.

    Errors: `StoreError` with STORE_MISSING, STORE_NOT_A_DIRECTORY, STORE_FOREIGN, STORE_FORMAT_NEWER, STORE_READ_ONLY,
    STORE_BUSY, STORE_FULL or STORE_IO.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        durable: bool = False,
        read_only: bool | None = None,
        max_bytes: int | None = None,
        retention: str | PolicyConfig | None = "lru",
        admission: bool = False,
        zero_tenants: Collection[str] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
        files: FileSystem | None = None,
        connect: Connect = connect_sqlite,
        wait_s: float = 10.0,
        wrap_tier: Callable[[FileTier], ChunkTier] | None = None,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"max_bytes={max_bytes} must be positive")
        if retention is not None:
            make_policy(retention)
        self.path = Path(path).expanduser()
        self.files: FileSystem = files if files is not None else OsFiles()
        self.catalog: Catalog | None = None
        self._full: StoreError | None = None
        marker = prepare(self.path, create=create and not read_only, files=self.files)
        self.read_only = read_only is True or not self._may_write(insist=read_only is False)
        try:
            self._lock: StoreLock | None = StoreLock(self.path, create=not self.read_only)
        except OSError as error:
            raise storage_error(error, f"locking the store {self.path}") from error
        try:
            self._lock.share(wait_s)
            if not self.read_only and marker.format < STORE_FORMAT:
                marker = self._upgrade()
            options = {"durable": durable, "max_bytes": max_bytes, "zero_tenants": zero_tenants, "progress": progress}
            try:
                self.catalog = self._open_catalog(marker, connect=connect, **options)
            except StoreError as error:
                if not self._may_be_read(error, insist=read_only is False):
                    raise
                self.catalog = self._open_catalog(marker, connect=connect)
            if self.catalog is not None and not self.read_only:
                with self._lock.exclusive() as alone:
                    if alone:
                        remove_temporaries(self.path, self.files)
                        self.catalog.count_aside()
        except BaseException:
            self.close()
            raise
        self.file_tier = FileTier(
            self.path,
            durable=durable,
            files=self.files,
            read_only=self.read_only,
            journal=self.catalog.journal if self.catalog else None,
        )
        self.tier: ChunkTier = self.file_tier if wrap_tier is None else wrap_tier(self.file_tier)
        self.admission = AdmissionFilter() if admission else None
        self.in_use = ChunksInUse(self.catalog if not self.read_only else None, self.admission)
        self.rates = ServiceLedger()
        self.room: Room | None = None
        if self.catalog is not None and max_bytes is not None and retention is not None and not self.read_only:
            self.room = Room(self.catalog, max_bytes, self.in_use, retention, self.admission)
            self.catalog.journal.make_room = self.room.make

    def usage(self) -> StoreUsage:
        """Count chunks, sessions, snapshots, damaged and temporary files, with their bytes; blocks."""
        self._open_lock()
        return measure(self.path)

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Iterator[ChunkVerdict]:
        """Read every chunk and yield a verdict for each; calls `progress(done, total)` in chunks. Changes nothing."""
        self._open_lock()
        return verify_chunks(self.file_tier, progress)

    def audit(self) -> list[Finding]:
        """What does not agree between catalog, files and manifests; changes nothing; blocks. Errors: `StoreError`."""
        self._open_lock()
        return audit(self.catalog, self.path, self.files) if self.catalog is not None else []

    def repair(self, findings: Iterable[Finding]) -> int:
        """Put right what `audit` found; returns how many; blocks. Errors: `StoreError`."""
        self.require_writable()
        assert self.catalog is not None
        return repair(self.catalog, self.path, self.files, findings)

    def collect(self, keep: Collection[bytes] | Callable[[], Collection[bytes]]) -> CollectResult:
        """Remove the chunks that are not in `keep`, and stale temporaries, if nobody else has the store open.

        A callable `keep` is asked while the store is held alone, so that nothing can be saved between the question and
        the removal; what it raises passes through, with nothing removed. Does not wait. Errors: `StoreError`.
        """
        lock = self._open_lock()
        if self.read_only:
            reason = self._full.reason if self._full is not None else Reason.STORE_READ_ONLY
            return CollectResult(
                CollectOutcome.READ_ONLY, reason=reason, detail=f"{self.path} is open for reading only"
            )
        with lock.exclusive() as alone:
            if not alone:
                detail = f"{self.path} is also open in {lock.describe_holders()}"
                return CollectResult(CollectOutcome.BUSY, reason=Reason.STORE_BUSY, detail=detail)
            wanted = frozenset(keep() if callable(keep) else keep)
            assert self.catalog is not None
            self.in_use.settle()
            self.catalog.recover()
            evicted = evict(self.catalog, [chunk for chunk in self.file_tier.list() if chunk not in wanted])
            strays, stray_bytes = remove_strays(self.path, self.catalog, wanted, self.files)
            temporaries, temporary_bytes = remove_temporaries(self.path, self.files)
            self.catalog.count_aside()
        return CollectResult(
            CollectOutcome.DONE,
            len(evicted.removed) + strays,
            temporaries,
            evicted.bytes_freed + stray_bytes + temporary_bytes,
        )

    def evict(self, chunks: Collection[bytes]) -> EvictResult:
        """Remove `chunks` while other processes may use the store; those that are pinned, or not there, are refused.

        Blocks. A reader that has one open reads it to the end, unless its tenant asks for zeros: it finds it damaged
        then. Errors: `StoreError`.
        """
        self.require_writable()
        assert self.catalog is not None
        self.in_use.settle()
        return evict(self.catalog, chunks)

    def require_writable(self) -> None:
        """Errors: `StoreError` with STORE_READ_ONLY or STORE_FULL when writes are refused, `StateError` if closed."""
        self._open_lock()
        if self._full is not None:
            raise StoreError(self._full.reason, self._full.cause, self._full.next_step)
        if self.read_only:
            raise StoreError(
                Reason.STORE_READ_ONLY,
                f"the store at {self.path} is open for reading only",
                "check the owner and the mount options of the directory, or name another store",
            )

    def close(self) -> None:
        """Let go of the store; leases end. Idempotent."""
        if self.catalog is not None:
            self.catalog.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_lock(self) -> StoreLock:
        if self._lock is None:
            raise StateError(Reason.CLOSED, f"the store at {self.path} is closed", "open it again")
        return self._lock

    def _upgrade(self) -> Marker:
        """Files alone become files with a catalog, which is built when it is opened. One process does it."""
        with alone_at_gate(self.path):
            current = prepare(self.path, create=False, files=self.files)
            return current if current.format >= STORE_FORMAT else write_marker(self.path, self.files, upgrade=True)

    def _open_catalog(self, marker: Marker, **options: Any) -> Catalog | None:
        if not self.read_only:
            return Catalog(self.path, marker.id, self.files, **options)
        # Files say themselves what they are: a reader does without a catalog that it cannot use.
        with contextlib.suppress(CatalogDamaged, StoreError):
            return Catalog(self.path, marker.id, self.files, read_only=True, connect=options["connect"])
        return None

    def _may_be_read(self, error: StoreError, *, insist: bool) -> bool:
        """On a disk so full that no log can be written, what is stored can still be read."""
        if insist or self.read_only or error.reason is not Reason.STORE_FULL:
            return False
        self._full, self.read_only = error, (self.path / CATALOG_NAME).exists()
        return self.read_only

    def _may_write(self, *, insist: bool) -> bool:
        probe = self.path / "tmp" / f"probe.{os.getpid()}"
        try:
            self.files.makedirs(probe.parent)
            self.files.close(self.files.open(probe, os.O_CREAT | os.O_RDWR))
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(probe)
        except OSError as error:
            refusal = storage_error(error, f"writing to the store {self.path}")
            if insist:
                raise refusal from error
            return refusal.reason is not Reason.STORE_READ_ONLY
        return True
