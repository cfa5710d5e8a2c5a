"""Sessions in a store: saved, loaded, listed and removed by name. The rows themselves are chunks of the store's tier.

sessions/<64 hex of tenant and name>/<sequence>.json     immutable manifests
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.contract.identity import ChunkContext, Namespace
from kvstrata.errors import KvstrataError, Reason, SessionError, StateError, StoreError
from kvstrata.sessions.names import folder_name
from kvstrata.sessions.snapshots import Snapshot
from kvstrata.store.catalog import Catalog
from kvstrata.store.catalog_database import CatalogDamaged
from kvstrata.store.collection import CollectOutcome, CollectResult
from kvstrata.store.store import Store
from kvstrata.tiers.filesystem import storage_error, write_fully

__all__ = ["RemoveResult", "SessionStore", "SessionSummary"]

_DEFAULT_TENANT = Namespace().tenant
_FILE_NAME = re.compile(r"[1-9][0-9]{0,17}\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One session in a listing. `latest` is its newest readable snapshot, or `None` when no manifest can be read;
    `damaged` holds the sequences that cannot."""

    folder: str
    sequences: tuple[int, ...]
    latest: Snapshot | None
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoveResult:
    """What a removal did: manifests that are gone, whether the whole session is, and what collecting chunks did."""

    snapshots_removed: int
    session_removed: bool
    collected: CollectResult


class SessionStore:
    """Sessions of an open `store`. Safe for several threads and processes; every call blocks.

    now: seconds since 1970, for `Snapshot.created_unix`.
    """

    def __init__(self, store: Store, *, now: Callable[[], float] = time.time) -> None:
        self.store = store
        self._root = store.path / "sessions"
        self._now = now

    def save(
        self,
        name: str,
        context: ChunkContext,
        token_ids: Sequence[int],
        chunks: Sequence[bytes],
        frontier: int,
        approximate_from: int | None = None,
    ) -> Snapshot:
        """Publish a new snapshot of `name`; its chunks must have been published before. Earlier snapshots stay.

        The chunks are pinned before the manifest is there, so that nobody evicts them in between. Two
        processes that save at once get two sequences. Errors: `SessionError` with SESSION_NAME_INVALID;
        `StoreError` with CHUNK_MISSING, STORE_READ_ONLY, STORE_FULL or STORE_IO, after which nothing is visible, unless
        only the disk did not confirm a manifest that is there. Once it is there, a catalog that cannot be written is no
        failure: what it must learn, it learns later.
        """
        self.store.require_writable()
        folder = self._root / folder_name(context.namespace.tenant, name)
        for chunk in chunks:
            if not self.store.tier.has(chunk):
                raise _chunk_missing(name, chunk)
        ids = tuple(int(token) for token in token_ids)
        created = self._now()
        taken: set[int] = set()
        # Held first: room for the manifest itself must not be made from the chunks that it names.
        if missing := self.store.in_use.hold(chunks):
            self.store.in_use.drop(chunk for chunk in chunks if chunk not in missing)
            raise _chunk_missing(name, missing[0])
        try:
            while True:
                sequence = max({0, *self._sequences(folder), *taken}) + 1
                numbered = Snapshot(
                    name, sequence, context, ids, tuple(chunks), int(frontier), created, approximate_from
                )
                if self._publish(folder, numbered):
                    return numbered
                taken.add(sequence)
        except StoreError:
            raise
        except OSError as error:
            raise storage_error(error, f"saving session {name!r} in {self.store.path}") from error
        finally:
            self.store.in_use.drop(chunks)
            # Whether the session is there has been decided; leases that cannot be ended now end later.
            with contextlib.suppress(KvstrataError, CatalogDamaged):
                self.store.in_use.settle()

    def load(self, name: str, tenant: str = _DEFAULT_TENANT, sequence: int | None = None) -> Snapshot:
        """Read and verify the manifest of `name`, the latest unless `sequence` says otherwise. Its chunks are not read.

        Errors: `SessionError` with SESSION_NAME_INVALID, SESSION_UNKNOWN or SESSION_DAMAGED, `StoreError`.
        """
        folder = self._root / folder_name(tenant, name)
        present = self._sequences(folder)
        if not present or (sequence is not None and sequence not in present):
            raise self._unknown(name, tenant, sequence, present)
        wanted = present[-1] if sequence is None else sequence
        snapshot = self._read(folder, wanted)
        if (snapshot.name, snapshot.tenant, snapshot.sequence) != (name, tenant, wanted):
            raise SessionError(
                Reason.SESSION_DAMAGED,
                f"the manifest of session {name!r}, sequence {wanted}, belongs to {snapshot.name!r} of tenant"
                f" {snapshot.tenant!r}",
                f"remove it with `kvstrata store rm NAME`, or load another of the sequences {_words(present)}",
            )
        return snapshot

    def list(self) -> list[SessionSummary]:
        """All sessions of all tenants, unreadable ones included, the latest saved first."""
        found: dict[str, dict[int, Snapshot | KvstrataError]] = {}
        for folder, sequence, content in self.snapshots():
            found.setdefault(folder, {})[sequence] = content
        summaries = []
        for folder, contents in found.items():
            readable = [content for content in contents.values() if isinstance(content, Snapshot)]
            damaged = tuple(number for number, content in contents.items() if isinstance(content, KvstrataError))
            latest = readable[-1] if readable else None
            summaries.append(SessionSummary(folder, tuple(contents), latest, damaged))
        return sorted(summaries, key=lambda item: -item.latest.created_unix if item.latest else 0.0)

    def snapshots(self) -> Iterator[tuple[str, int, Snapshot | KvstrataError]]:
        """Every manifest as (folder name, sequence, snapshot or why it cannot be read), sequences ascending."""
        for folder in self._folders():
            for sequence in self._sequences(folder):
                try:
                    yield folder.name, sequence, self._read(folder, sequence)
                except KvstrataError as error:
                    yield folder.name, sequence, error

    def referenced(self) -> frozenset[bytes]:
        """Chunks that any snapshot refers to. Errors: `SessionError` or `StoreError` when a manifest is unreadable."""
        chunks: set[bytes] = set()
        for folder in self._folders():
            for path in folder.glob("*.json"):
                if not _FILE_NAME.fullmatch(path.name):
                    raise SessionError(Reason.SESSION_DAMAGED, f"{path} is not a manifest", "move the file elsewhere")
            for sequence in self._sequences(folder):
                chunks.update(self._read(folder, sequence).chunks)
        return frozenset(chunks)

    def remove(
        self,
        name: str,
        tenant: str = _DEFAULT_TENANT,
        sequence: int | None = None,
        keep: Collection[bytes] = (),
    ) -> RemoveResult:
        """Remove the snapshots of `name`, or one of them, then the chunks that no snapshot refers to any more.

        `keep`: chunks to spare besides, e.g. those of a running conversation. Damaged manifests go as well. The
        chunks stay when somebody else has the store open or when any manifest cannot be read: `collected` says so.
        Errors: `SessionError` with SESSION_NAME_INVALID or SESSION_UNKNOWN, `StoreError`.
        """
        self.store.require_writable()
        folder = self._root / folder_name(tenant, name)
        present = self._sequences(folder)
        chosen = present if sequence is None else tuple(number for number in present if number == sequence)
        if not chosen:
            raise self._unknown(name, tenant, sequence, present)
        try:
            for number in chosen:
                with contextlib.suppress(FileNotFoundError):
                    self.store.files.unlink(folder / _file_name(number))
                self._catalog().pins.drop_session(folder.name, number)
        except StoreError:
            raise
        except OSError as error:
            raise storage_error(error, f"removing session {name!r} from {self.store.path}") from error
        with contextlib.suppress(OSError):
            folder.rmdir()
        return RemoveResult(len(chosen), not folder.exists(), self.collect(keep))

    def collect(self, keep: Collection[bytes] = ()) -> CollectResult:
        """Remove the chunks that no snapshot refers to and `keep` does not name; nothing if one cannot be sure."""
        try:
            return self.store.collect(lambda: self.referenced() | set(keep))
        except KvstrataError as error:
            if error.reason not in {Reason.SESSION_DAMAGED, Reason.STORE_FORMAT_NEWER}:
                raise
            return CollectResult(CollectOutcome.UNREADABLE, reason=error.reason, detail=error.cause)

    def _publish(self, folder: Path, snapshot: Snapshot) -> bool:
        """Whether the manifest is there now; `False` when its sequence is taken."""
        files, pins = self.store.files, self._catalog().pins
        temporary = self.store.path / "tmp" / f"{folder.name}.{os.getpid()}-{os.urandom(8).hex()}"
        final = folder / _file_name(snapshot.sequence)
        content = snapshot.encode()
        claim = pins.claim_session(folder.name, snapshot.sequence, snapshot.chunks, temporary.name, len(content))
        if claim.missing:
            raise _chunk_missing(snapshot.name, claim.missing[0])
        if claim.taken:
            return False
        linked = False
        try:
            files.makedirs(temporary.parent)
            fd = files.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR)
            try:
                write_fully(files, fd, [memoryview(content)], 0)
                if self.store.tier.durable:
                    files.fdatasync(fd)
            finally:
                files.close(fd)
            files.makedirs(folder)
            files.link(temporary, final)
            linked = True
            if self.store.tier.durable:
                files.sync_directory(folder)
                files.sync_directory(self._root)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if folder.exists():
                raise
            return False
        finally:
            with contextlib.suppress(OSError):
                files.unlink(temporary)
            pins.settle_session(claim, len(content) if linked else None)
        return True

    def _catalog(self) -> Catalog:
        catalog = self.store.catalog
        if catalog is None:
            self.store.require_writable()
            raise StateError(Reason.CLOSED, f"the store at {self.store.path} is closed", "open it again")
        return catalog

    def _read(self, folder: Path, sequence: int) -> Snapshot:
        path = folder / _file_name(sequence)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise storage_error(error, f"reading {path}") from error
        return Snapshot.decode(raw, str(path))

    def _folders(self) -> tuple[Path, ...]:
        try:
            return tuple(sorted(path for path in self._root.iterdir() if path.is_dir()))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise storage_error(error, f"listing {self._root}") from error

    def _sequences(self, folder: Path) -> tuple[int, ...]:
        try:
            names = [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise storage_error(error, f"listing {folder}") from error
        return tuple(sorted(int(name.removesuffix(".json")) for name in names if _FILE_NAME.fullmatch(name)))

    def _unknown(self, name: str, tenant: str, sequence: int | None, present: Sequence[int]) -> SessionError:
        what = f"session {name!r} of tenant {tenant!r}"
        if present:
            return SessionError(
                Reason.SESSION_UNKNOWN, f"{what} has no sequence {sequence}", f"it has the sequences {_words(present)}"
            )
        return SessionError(
            Reason.SESSION_UNKNOWN,
            f"{what} is not in {self.store.path}",
            f"`kvstrata store ls --store {self.store.path}` lists the sessions there",
        )


def _chunk_missing(name: str, chunk: bytes) -> StoreError:
    return StoreError(
        Reason.CHUNK_MISSING,
        f"session {name!r} cannot be saved: chunk {chunk.hex()} is not in the store",
        "store all chunks first, then save the session",
    )


def _file_name(sequence: int) -> str:
    return f"{sequence}.json"


def _words(sequences: Sequence[int]) -> str:
    return ", ".join(map(str, sequences))
