"""The file tier: one checksummed file for each chunk, written under a temporary name and published whole.

    root/chunks/<first 2 hex>/<64 hex>.kv     published chunks, immutable
    root/tmp/                                 writes under way; never read
    root/damaged/                             files that failed a check, moved aside; never read again

A write is a transaction: reserve, copy, validate, publish, release. Whatever fails, readers see the whole chunk or
nothing. With a journal a chunk is published when its row says so; without one, when its file has its name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.contract.capability import FILES, Persistence, TierCapability, Visibility
from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, DamagedError, Reason, StoreError
from kvstrata.ports import Clock
from kvstrata.tiers.chunk_file import ChunkFile, ReadReceipt
from kvstrata.tiers.chunk_format import ALIGNMENT, Header, payload_bytes
from kvstrata.tiers.chunk_writer import ChunkRows, Draft
from kvstrata.tiers.filesystem import NO_HARD_LINKS, FileSystem, OsFiles, storage_error
from kvstrata.tiers.header_cache import HeaderCache
from kvstrata.tiers.journal import Intent, WriteJournal, WriteOutcome

__all__ = [
    "ChunkFile",
    "ChunkRows",
    "FileSystem",
    "FileTier",
    "OsFiles",
    "ReadReceipt",
    "WriteOutcome",
    "WriteReceipt",
    "chunk_path",
    "payload_bytes",
]

_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_DAMAGED_KEPT = 16
_PUBLISH_ATTEMPTS = 8
_PRESENT = WriteOutcome.ALREADY_PRESENT


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """What a write did.

    bytes: size of the file, padding included; 0 when nothing had to be written. payload_bytes: size of the rows.
    checksum_seconds: hashing the source. write_seconds: reserving, copying and publishing. validate_seconds: reading
    back.
    """

    outcome: WriteOutcome
    bytes: int
    payload_bytes: int
    checksum_seconds: float
    write_seconds: float
    validate_seconds: float

    @classmethod
    def of(cls, draft: Draft) -> WriteReceipt:
        """For a draft that has its outcome."""
        assert draft.outcome is not None
        size = draft.file_bytes if draft.header is not None else 0
        times = (draft.checksum_seconds, draft.write_seconds, draft.validate_seconds)
        return cls(draft.outcome, size, draft.payload_bytes, *times)


class FileTier:
    """Chunks as files below `root`. Safe for several threads and several processes at once; every call blocks.

    durable: a published chunk has reached the disk (fdatasync of the file, fsync of its directory) before `write`
    returns. files: the system calls. read_only: refuse writes and never touch the directory. journal: whose rows say
    what is published, and which holds a cap; without one the names of the files do. clock: for receipts.
    """

    def __init__(
        self,
        root: Path,
        *,
        durable: bool = False,
        files: FileSystem | None = None,
        read_only: bool = False,
        journal: WriteJournal | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.root = root
        self.durable = durable
        self.read_only = read_only
        self._files = files if files is not None else OsFiles()
        self._journal = journal
        self._clock = clock
        self._serial = itertools.count()
        self._revoked: set[bytes] = set()
        self._known_folders: set[Path] = set()
        self._headers = HeaderCache()
        self._lock = threading.Lock()

    @property
    def capability(self) -> TierCapability:
        """Files are read into the host's memory and written from it; a rename publishes them."""
        return TierCapability(
            FILES,
            "file",
            kernel_readable=False,
            dma_source=True,
            dma_destination=not self.read_only,
            persistence=Persistence.MACHINE,
            visibility=Visibility.RENAME,
            alignment=ALIGNMENT,
        )

    def path(self, chunk: bytes) -> Path:
        """Where the file of `chunk` lies, whether it exists or not."""
        return chunk_path(self.root, chunk)

    def has(self, chunk: bytes) -> bool:
        """Whether a chunk of that name is published. A hit, not yet an arrival: `open` and `read_into` verify."""
        return self._published(chunk) and self.path(chunk).is_file()

    def list(self) -> Iterator[bytes]:
        """Digests of all published chunks, in no particular order; a snapshot is not promised while others write."""
        if self._journal is not None:
            yield from (chunk for chunk in self._journal.list() if chunk not in self._revoked)
            return
        try:
            shards = list(filter(Path.is_dir, (self.root / "chunks").iterdir()))
        except FileNotFoundError:
            return
        for shard in shards:
            for path in shard.iterdir():
                if _NAME.fullmatch(path.name) and (chunk := bytes.fromhex(path.stem)) not in self._revoked:
                    yield chunk

    def open(self, chunk: bytes) -> ChunkFile:
        """Parse and verify the header of `chunk`; the caller closes the file.

        Errors: `DamagedError` with CHUNK_MISSING, CHUNK_TRUNCATED, CHUNK_DAMAGED, CHUNK_FOREIGN or CHUNK_FORMAT_NEWER;
        `StoreError` with STORE_IO or STORE_READ_ONLY when the system refuses to read.
        """
        if not self._published(chunk):
            why = "was found damaged" if chunk in self._revoked else "is not published"
            raise DamagedError(
                Reason.CHUNK_MISSING,
                f"chunk {chunk.hex()} {why} in {self.root}",
                "its rows are recomputed from the tokens",
                chunk=chunk.hex(),
            )
        return ChunkFile(self._files, self.path(chunk), chunk, self._clock, self._headers)

    def write(
        self, identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]
    ) -> WriteReceipt:
        """Store one chunk. `segments[layer]` are C-contiguous buffers that together hold `payload_bytes` of that layer.

        The source must not change until the call returns. A valid replica of the same chunk and layout is verified and
        kept. On any failure the temporary is removed and nothing becomes visible. Errors: `StoreError` with STORE_FULL,
        STORE_READ_ONLY or STORE_IO; `ConfigurationError` for segments that do not fit identity and layout.
        """
        return self.write_all([(identity, layout, segments)])[0]

    def write_all(self, chunks: Sequence[ChunkRows]) -> Sequence[WriteReceipt]:
        """Store several chunks, in two transactions of the journal and, if durable, one wait for its rows.

        With a journal they become visible together or, after a failure, not at all. What the transactions take is
        shared out evenly over the receipts. Errors: as `write`; `ConfigurationError` for a chunk that comes twice.
        """
        if self.read_only:
            raise StoreError(
                Reason.STORE_READ_ONLY,
                f"the store at {self.root} is open for reading only",
                "open a store that you may write to",
            )
        drafts = [Draft(chunk) for chunk in chunks]
        if len({draft.chunk for draft in drafts}) != len(drafts):
            raise ConfigurationError(Reason.INVALID_ARGUMENT, "chunks names one chunk twice")
        for draft in drafts:
            start = self._clock()
            draft.met = self._occupant(draft.chunk, draft.layout, self.path(draft.chunk))
            if draft.met is WriteOutcome.ALREADY_PRESENT:
                draft.outcome = draft.met
                draft.validate_seconds = self._clock() - start
        pending = [draft for draft in drafts if draft.outcome is None]
        if pending:
            try:
                self._write_new(pending)
            except OSError as error:
                if isinstance(error, StoreError):
                    raise
                which = f"chunk {pending[0].chunk.hex()}" if len(pending) == 1 else f"{len(pending)} chunks"
                raise storage_error(error, f"writing {which} to {self.root}") from error
        return [WriteReceipt.of(draft) for draft in drafts]

    def revoke(self, chunk: bytes) -> bool:
        """Take a damaged chunk out of use; whether there was a file to take.

        The file moves to `damaged/`, where the latest 16 are kept. Where it cannot be moved, this object remembers that
        it must not be read. Either way it is no hit again until it is written anew.
        """
        found = self.has(chunk)
        recorded = self._journal is not None and self._journal.published(chunk)
        self._headers.forget(chunk)
        with self._lock:
            self._revoked.add(chunk)
        if self.read_only or not (found or recorded):
            return found
        try:
            if self._journal is None:
                found = self._set_aside(chunk)
            else:
                found = self._journal.remove(chunk, lambda: self._set_aside(chunk))
        except OSError:
            return True
        with self._lock:
            self._revoked.discard(chunk)
        return found

    def _published(self, chunk: bytes) -> bool:
        return chunk not in self._revoked and (self._journal is None or self._journal.published(chunk))

    def _set_aside(self, chunk: bytes) -> bool:
        path, aside = self.path(chunk), self.root / "damaged"
        try:
            self._files.makedirs(aside)
            self._files.replace(path, aside / f"{path.stem}.{os.getpid()}-{next(self._serial)}")
        except FileNotFoundError:
            return False
        self._trim(aside)
        return True

    def _temporary(self, chunk: bytes) -> Path:
        """A name that no file has: process ids come back, and a journal's names are unique over all processes."""
        return self.root / "tmp" / f"{chunk.hex()}.{os.getpid()}-{next(self._serial)}-{os.urandom(4).hex()}"

    def _created(self, temporary: Path) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        try:
            return self._files.open(temporary, flags)
        except FileNotFoundError:
            self._files.makedirs(temporary.parent)
            return self._files.open(temporary, flags)

    def _discard(self, *temporaries: Path) -> None:
        for temporary in temporaries:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)

    def _write_new(self, drafts: Sequence[Draft]) -> None:
        start = self._clock()
        temporaries = [self._temporary(draft.chunk) for draft in drafts]
        transactions: Sequence[int] = [0] * len(drafts)
        if self._journal is not None:
            pairs = zip(drafts, temporaries, strict=True)
            intents = [Intent(draft.identity, name.name, draft.file_bytes) for draft, name in pairs]
            transactions = self._journal.reserve(intents)
        apart = self._clock() - start
        try:
            headers = [self._copied(draft, temporary) for draft, temporary in zip(drafts, temporaries, strict=True)]
            start = self._clock()
            for draft in drafts:
                if self.durable and draft.fd is not None:
                    self._files.fdatasync(draft.fd)
                draft.close(self._files)
            outcomes = self._publish(transactions, headers, temporaries, [draft.met for draft in drafts])
        except BaseException:
            for draft in drafts:
                with contextlib.suppress(OSError):
                    draft.close(self._files)
            if self._journal is not None:
                self._journal.abort([(each, draft.identity) for each, draft in zip(transactions, drafts, strict=True)])
            self._discard(*temporaries)
            raise
        self._discard(*temporaries)
        apart += self._clock() - start
        for draft, outcome in zip(drafts, outcomes, strict=True):
            draft.outcome = outcome
            draft.write_seconds += apart / len(drafts)
        with self._lock:
            self._revoked.difference_update(draft.chunk for draft in drafts)

    def _copied(self, draft: Draft, temporary: Path) -> Header:
        try:
            return draft.copy(self._files, self._created(temporary), self._clock)
        except ValueError as error:
            raise StoreError(
                Reason.STORE_IO,
                f"what was written to {self.root} reads back otherwise: {error}",
                "nothing was published; check the disk and the memory, then try again",
            ) from error

    def _publish(
        self,
        transactions: Sequence[int],
        headers: Sequence[Header],
        temporaries: Sequence[Path],
        met: Sequence[WriteOutcome],
    ) -> Sequence[WriteOutcome]:
        finals = [self.path(header.identity.digest) for header in headers]
        for final in finals:
            if final.parent not in self._known_folders:
                self._files.makedirs(final.parent)
        if self._journal is None:
            outcomes = [
                self._link_or_replace(temporary, final, header, outcome)
                for temporary, final, header, outcome in zip(temporaries, finals, headers, met, strict=True)
            ]
            self._sync(finals)
            return outcomes

        def place(same: Sequence[bool]) -> Sequence[WriteOutcome]:
            outcomes = [self._place(*each) for each in zip(temporaries, finals, met, same, strict=True)]
            self._sync([final for final, outcome in zip(finals, outcomes, strict=True) if outcome is not _PRESENT])
            return outcomes

        return self._journal.publish(list(zip(transactions, headers, strict=True)), place)

    def _place(self, temporary: Path, final: Path, met: WriteOutcome, same: bool) -> WriteOutcome:
        """Under a journal, which lets in one process at a time: a file without a row is never adopted."""
        if same and met is not WriteOutcome.REPLACED and final.is_file():
            return WriteOutcome.ALREADY_PRESENT
        try:
            self._link(temporary, final)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS and not isinstance(error, FileExistsError):
                raise
            self._files.replace(temporary, final)
        return met

    def _link_or_replace(self, temporary: Path, final: Path, header: Header, outcome: WriteOutcome) -> WriteOutcome:
        chunk = header.identity.digest
        for _ in range(_PUBLISH_ATTEMPTS):
            try:
                self._link(temporary, final)
            except FileExistsError:
                outcome = self._occupant(chunk, header.layout, final)
                if outcome is WriteOutcome.ALREADY_PRESENT:
                    return outcome
                if not final.is_file():
                    continue
                self._files.replace(temporary, final)
            except OSError as error:
                if error.errno not in NO_HARD_LINKS:
                    raise
                self._files.replace(temporary, final)
            return outcome
        raise StoreError(Reason.STORE_IO, f"chunk {chunk.hex()} keeps changing in {self.root}", "try again")

    def _link(self, temporary: Path, final: Path) -> None:
        try:
            self._files.link(temporary, final)
        except FileNotFoundError:
            self._known_folders.discard(final.parent)
            self._files.makedirs(final.parent)
            self._files.link(temporary, final)

    def _sync(self, finals: Sequence[Path]) -> None:
        """Directories whose names have changed, each once, and the one above them where any of them is new."""
        folders = {final.parent for final in finals}
        if self.durable:
            for folder in folders:
                self._files.sync_directory(folder)
            for above in {folder.parent for folder in folders - self._known_folders}:
                self._files.sync_directory(above)
        self._known_folders |= folders

    def _occupant(self, chunk: bytes, layout: SegmentLayout, path: Path) -> WriteOutcome:
        """What writing `chunk` would meet: nothing, a valid replica, or one to replace; damaged ones move aside."""
        if not path.is_file() or not (self._journal is None or self._journal.published(chunk)):
            return WriteOutcome.WRITTEN
        try:
            with self.open(chunk) as present:
                present.verify_payload()
                same = present.layout == layout
        except DamagedError as error:
            if error.reason is Reason.CHUNK_FORMAT_NEWER:
                raise
            self.revoke(chunk)
            return WriteOutcome.REPLACED
        return WriteOutcome.ALREADY_PRESENT if same else WriteOutcome.REPLACED

    def _trim(self, aside: Path) -> None:
        oldest_first = sorted(aside.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in oldest_first[:-_DAMAGED_KEPT]:
            self._files.unlink(path)


def chunk_path(root: Path, chunk: bytes) -> Path:
    """Where the file of `chunk` lies below `root`, whether it exists or not."""
    name = chunk.hex()
    return root.joinpath("chunks", name[:2], f"{name}.kv")
