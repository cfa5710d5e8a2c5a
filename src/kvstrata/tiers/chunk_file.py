"""One chunk file, open for reading: ranged reads of single layers into the caller's memory, each verified."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, DamagedError, Reason, StateError
from kvstrata.ports import Clock
from kvstrata.tiers.chunk_format import ALIGNMENT, PREFIX_BYTES, Header, header_bytes_of, payload_key
from kvstrata.tiers.filesystem import FileSystem, read_fully, storage_error
from kvstrata.tiers.header_cache import HeaderCache

__all__ = ["ChunkFile", "ReadReceipt"]


@dataclass(frozen=True, slots=True)
class ReadReceipt:
    """What one verified read of a whole payload cost: bytes, and seconds of reading and of checksums apart."""

    bytes: int
    read_seconds: float
    checksum_seconds: float


class ChunkFile:
    """A verified header and the means to read the segments below it. Any number of threads may read at once.

    Attributes:
        identity: the chunk.
        layout: how each segment lies.
        header: the whole parsed header.
        layers: number of segments.
        tokens: number of tokens, at most `layout.chunk_tokens`.
        segment_bytes: payload bytes of one layer.
        nbytes: payload bytes of all layers.
        stored_bytes: size of the file.
    """

    def __init__(
        self,
        files: FileSystem,
        path: Path,
        chunk: bytes,
        clock: Clock = time.perf_counter,
        headers: HeaderCache | None = None,
    ) -> None:
        """Open `path` as the chunk named `chunk`; reads the header only. Errors: as `FileTier.open`.

        headers: where verified headers are remembered.
        """
        self._files = files
        self._clock = clock
        self._name = chunk.hex()
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False
        try:
            self._fd = files.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedError(
                Reason.CHUNK_MISSING,
                f"chunk {self._name} is not in {path.parent}",
                "its rows are recomputed from the tokens",
                chunk=self._name,
            ) from None
        except OSError as error:
            raise storage_error(error, f"opening {path}") from error
        try:
            self.header = self._read_header(chunk, headers)
        except BaseException:
            files.close(self._fd)
            raise
        self.identity: ChunkIdentity = self.header.identity
        self.layout: SegmentLayout = self.header.layout
        self.layers = len(self.header.segments)
        self.tokens = len(self.identity.token_ids)
        self.segment_bytes = self.header.segments[0].length
        self.nbytes = self.layers * self.segment_bytes
        self.stored_bytes = self.header.file_bytes
        self._offsets = self.header.offsets
        self._checksums = self.header.checksums

    def read_into(self, layer: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` with the segment of `layer` and verify it; blocks; returns the bytes read.

        The buffers must be C-contiguous and together hold exactly `segment_bytes` bytes: the used pages of every K/V
        head in order. Their content is undefined after an error. The interpreter lock is free while the system reads
        and while a large buffer is hashed. Errors: `DamagedError` with CHUNK_TRUNCATED or CHUNK_DAMAGED, `StoreError`
        with STORE_IO, `ConfigurationError` for buffers of another size, `StateError` after `close`.
        """
        length = self.segment_bytes
        wanted = buffers[0].nbytes if len(buffers) == 1 else sum([buffer.nbytes for buffer in buffers])
        if wanted != length or not 0 <= layer < self.layers:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"layer={layer} with buffers of {wanted} bytes; the chunk has {self.layers} layers of {length} bytes",
            )
        with self._lock:
            if self._closed:
                raise StateError(Reason.CLOSED, f"chunk file {self._name} is closed")
            self._readers += 1
        try:
            done = read_fully(self._files, self._fd, buffers, self._offsets[layer], length)
        except OSError as error:
            raise storage_error(error, f"reading layer {layer} of chunk {self._name}") from error
        finally:
            self._leave()
        if done != length:
            raise DamagedError(
                Reason.CHUNK_TRUNCATED,
                f"chunk {self._name} ends inside layer {layer}: {done} of {length} bytes",
                "its rows are recomputed from the tokens; check the disk",
                chunk=self._name,
            )
        if len(buffers) == 1:
            checksum = xxh3_128_digest(buffers[0])
        else:
            hasher = xxh3_128()
            for buffer in buffers:
                hasher.update(buffer)
            checksum = hasher.digest()
        if checksum != self._checksums[layer]:
            raise self._mismatch(f"layer {layer} does not match its checksum")
        return done

    def checksum(self, layer: int) -> bytes:
        """The xxh3_128 that `read_into` holds the segment of `layer` to."""
        return self._checksums[layer]

    def verify_payload(self) -> ReadReceipt:
        """Read everything once: every segment against its xxh3_128, the whole against the tenant's keyed BLAKE3.

        Blocks; allocates one segment. Errors: as `read_into`.
        """
        scratch = memoryview(bytearray(self.segment_bytes))
        keyed = blake3(key=payload_key(self.identity.context.namespace))
        reading = hashing = 0.0
        for layer in range(self.layers):
            start = self._clock()
            self.read_into(layer, [scratch])
            middle = self._clock()
            keyed.update(scratch)
            reading += middle - start
            hashing += self._clock() - middle
        if keyed.digest() != self.header.payload_digest:
            raise self._mismatch("its payload does not match the digest of its tenant")
        return ReadReceipt(self.nbytes, reading, hashing)

    def close(self) -> None:
        """Refuse further reads; the descriptor is given back when the last running read has left. Idempotent."""
        with self._lock:
            last = not self._closed and not self._readers
            self._closed = True
        if last:
            self._files.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _leave(self) -> None:
        with self._lock:
            self._readers -= 1
            last = self._closed and not self._readers
        if last:
            self._files.close(self._fd)

    def _read_header(self, chunk: bytes, headers: HeaderCache | None) -> Header:
        try:
            size = self._files.size(self._fd)
        except OSError as error:
            raise storage_error(error, f"reading the size of chunk {self._name}") from error
        first = min(size, ALIGNMENT)
        raw = self._read(first, 0)
        known = headers.find(chunk, raw, size) if headers is not None else None
        if known is not None:
            return known
        header_bytes = header_bytes_of(raw[:PREFIX_BYTES] if len(raw) == first else b"", size, chunk)
        if first < header_bytes:
            raw += self._read(header_bytes - first, first)
        if len(raw) < header_bytes:
            raise self._mismatch("its header could not be read to its end")
        raw = raw[:header_bytes]
        header = Header.parse(raw, chunk)
        if header.file_bytes != size:
            raise self._mismatch("its table does not end where the file ends")
        if headers is not None:
            headers.keep(chunk, raw, header)
        return header

    def _read(self, length: int, offset: int) -> bytes:
        buffer = bytearray(length)
        try:
            done = read_fully(self._files, self._fd, [memoryview(buffer)], offset, length)
        except OSError as error:
            raise storage_error(error, f"reading the header of chunk {self._name}") from error
        return bytes(buffer[:done])

    def _mismatch(self, what: str) -> DamagedError:
        return DamagedError(
            Reason.CHUNK_DAMAGED,
            f"chunk {self._name} is damaged: {what}",
            "it is set aside and its rows are recomputed; check the disk if this happens again",
            chunk=self._name,
        )
