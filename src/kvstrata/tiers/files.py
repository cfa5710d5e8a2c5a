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
from kvstrata.tiers.filesystem import NO_HARD_LINKS, FileSystem, OsFiles, storage_error, write_fully
from kvstrata.tiers.journal import WriteJournal, WriteOutcome

__all__ = [
    "ChunkFile",
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
        if chunk in self._revoked:
            raise DamagedError(
                Reason.CHUNK_MISSING,
                f"chunk {chunk.hex()} was found damaged earlier and is not read again",
                "its rows are recomputed from the tokens",
                chunk=chunk.hex(),
            )
        if not self._published(chunk):
            raise DamagedError(
                Reason.CHUNK_MISSING,
                f"chunk {chunk.hex()} is not published in {self.root}",
                "its rows are recomputed from the tokens",
                chunk=chunk.hex(),
            )
        return ChunkFile(self._files, self.path(chunk), chunk, self._clock)

    def write(
        self, identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]
    ) -> WriteReceipt:
        """Store one chunk. `segments[layer]` are C-contiguous buffers that together hold `payload_bytes` of that layer.

        The source must not change until the call returns. A valid replica of the same chunk and layout is verified and
        kept. On any failure the temporary is removed and nothing becomes visible. Errors: `StoreError` with STORE_FULL,
        STORE_READ_ONLY or STORE_IO; `ConfigurationError` for segments that do not fit identity and layout.
        """
        if self.read_only:
            raise StoreError(
                Reason.STORE_READ_ONLY,
                f"the store at {self.root} is open for reading only",
                "open a store that you may write to",
            )
        sources = _as_bytes(identity, layout, segments)
        payload = len(sources) * payload_bytes(layout, len(identity.token_ids))
        start = self._clock()
        met = self._occupant(identity.digest, layout)
        if met is WriteOutcome.ALREADY_PRESENT:
            return WriteReceipt(WriteOutcome.ALREADY_PRESENT, 0, payload, 0.0, 0.0, self._clock() - start)
        hashing = self._clock()
        header = Header.of(identity, layout, sources)
        copying = self._clock()
        try:
            temporary = self._temporary(identity.digest)
            transaction = self._journal.reserve(identity, temporary.name, header.file_bytes) if self._journal else 0
            try:
                self._copy(self._created(temporary), header, sources)
                validating = self._clock()
                self._validate(temporary, header)
                publishing = self._clock()
                outcome = self._publish(transaction, temporary, header, met)
            except BaseException:
                if self._journal:
                    self._journal.abort(transaction, identity)
                self._discard(temporary)
                raise
            self._discard(temporary)
        except StoreError:
            raise
        except OSError as error:
            raise storage_error(error, f"writing chunk {identity.digest.hex()} to {self.root}") from error
        with self._lock:
            self._revoked.discard(identity.digest)
        end = self._clock()
        return WriteReceipt(
            outcome,
            header.file_bytes,
            payload,
            checksum_seconds=copying - hashing,
            write_seconds=(validating - copying) + (end - publishing),
            validate_seconds=publishing - validating,
        )

    def revoke(self, chunk: bytes) -> bool:
        """Take a damaged chunk out of use; whether there was a file to take.

        The file moves to `damaged/`, where the latest 16 are kept. Where it cannot be moved, this object remembers that
        it must not be read. Either way it is no hit again until it is written anew.
        """
        found = self.has(chunk)
        recorded = self._journal is not None and self._journal.published(chunk)
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

    def _discard(self, temporary: Path) -> None:
        with contextlib.suppress(OSError):
            self._files.unlink(temporary)

    def _copy(self, fd: int, header: Header, sources: Sequence[Sequence[memoryview]]) -> None:
        try:
            self._files.allocate(fd, header.file_bytes)
            write_fully(self._files, fd, [memoryview(header.encode())], 0)
            for entry, buffers in zip(header.segments, sources, strict=True):
                write_fully(self._files, fd, buffers, entry.offset)
            if self.durable:
                self._files.fdatasync(fd)
        finally:
            self._files.close(fd)

    def _validate(self, temporary: Path, header: Header) -> None:
        try:
            with ChunkFile(self._files, temporary, header.identity.digest, written=header) as written:
                scratch = memoryview(bytearray(written.segment_bytes))
                for layer in range(written.layers):
                    written.read_into(layer, [scratch])
        except DamagedError as error:
            raise StoreError(
                Reason.STORE_IO,
                f"what was written to {self.root} reads back otherwise: {error.cause}",
                "nothing was published; check the disk and the memory, then try again",
            ) from error

    def _publish(self, transaction: int, temporary: Path, header: Header, met: WriteOutcome) -> WriteOutcome:
        chunk = header.identity.digest
        folder = self.path(chunk).parent
        if folder not in self._known_folders or not folder.is_dir():
            self._files.makedirs(folder)
            self._known_folders.discard(folder)
        if self._journal is None:
            return self._link_or_replace(temporary, chunk, header.layout, met)
        return self._journal.publish(transaction, header, lambda same: self._place(temporary, chunk, met, same=same))

    def _place(self, temporary: Path, chunk: bytes, met: WriteOutcome, *, same: bool) -> WriteOutcome:
        """Under a journal, which lets in one process at a time: a file without a row is never adopted."""
        final = self.path(chunk)
        if same and met is not WriteOutcome.REPLACED and final.is_file():
            return WriteOutcome.ALREADY_PRESENT
        try:
            self._files.link(temporary, final)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS and not isinstance(error, FileExistsError):
                raise
            self._files.replace(temporary, final)
        self._sync(final)
        return met

    def _link_or_replace(
        self, temporary: Path, chunk: bytes, layout: SegmentLayout, outcome: WriteOutcome
    ) -> WriteOutcome:
        final = self.path(chunk)
        for _ in range(_PUBLISH_ATTEMPTS):
            try:
                self._files.link(temporary, final)
                break
            except FileExistsError:
                outcome = self._occupant(chunk, layout)
                if outcome is WriteOutcome.ALREADY_PRESENT:
                    return outcome
                if final.is_file():
                    self._files.replace(temporary, final)
                    break
            except OSError as error:
                if error.errno not in NO_HARD_LINKS:
                    raise
                self._files.replace(temporary, final)
                break
        else:
            raise StoreError(Reason.STORE_IO, f"chunk {chunk.hex()} keeps changing in {self.root}", "try again")
        self._sync(final)
        return outcome

    def _sync(self, final: Path) -> None:
        if self.durable:
            self._files.sync_directory(final.parent)
            if final.parent not in self._known_folders:
                self._files.sync_directory(final.parent.parent)
        self._known_folders.add(final.parent)

    def _occupant(self, chunk: bytes, layout: SegmentLayout) -> WriteOutcome:
        """What writing `chunk` would meet: nothing, a valid replica, or one to replace; damaged ones move aside."""
        if not self.path(chunk).is_file() or not (self._journal is None or self._journal.published(chunk)):
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
        newest_first = sorted(aside.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in newest_first[_DAMAGED_KEPT:]:
            self._files.unlink(path)


def chunk_path(root: Path, chunk: bytes) -> Path:
    """Where the file of `chunk` lies below `root`, whether it exists or not."""
    name = chunk.hex()
    return root.joinpath("chunks", name[:2], f"{name}.kv")


def _as_bytes(
    identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]
) -> list[list[memoryview]]:
    if len(segments) != identity.context.abi.layers:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"segments has {len(segments)} layers, abi.layers={identity.context.abi.layers}"
        )
    if layout.chunk_tokens != identity.context.chunk_tokens:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"layout.chunk_tokens={layout.chunk_tokens}, context.chunk_tokens={identity.context.chunk_tokens}",
        )
    wanted = payload_bytes(layout, len(identity.token_ids))
    for layer, buffers in enumerate(segments):
        found = sum(buffer.nbytes for buffer in buffers)
        if found != wanted or not all(buffer.c_contiguous for buffer in buffers):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"segments[{layer}] must be {wanted} contiguous bytes, found {found} bytes"
            )
    return [[buffer.cast("B") for buffer in buffers] for buffers in segments]
