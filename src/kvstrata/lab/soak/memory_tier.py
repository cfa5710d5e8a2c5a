"""A chunk tier in memory that verifies every read as the file tier does, and can be damaged on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from xxhash import xxh3_128_digest

from kvstrata.contract.capability import FILES, Persistence, TierCapability, Visibility
from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.tiers.chunk_file import ReadReceipt
from kvstrata.tiers.files import WriteReceipt
from kvstrata.tiers.journal import WriteOutcome

__all__ = ["MemoryReader", "MemoryTier"]


@dataclass(slots=True)
class _Stored:
    identity: ChunkIdentity
    layout: SegmentLayout
    segments: list[bytearray]
    checksums: tuple[bytes, ...]

    def sound(self, layer: int) -> bool:
        return xxh3_128_digest(self.segments[layer]) == self.checksums[layer]


class MemoryTier:
    """Chunks in a dictionary. limit: chunks that fit. between(): called in the middle of every read and write, where
    other threads would run.
    """

    durable = True
    read_only = False

    def __init__(self, limit: int, between: Callable[[], None]) -> None:
        self.limit = limit
        self.between = between
        self._chunks: dict[bytes, _Stored] = {}

    @property
    def capability(self) -> TierCapability:
        """As of a file tier."""
        return TierCapability(FILES, "file", False, True, True, Persistence.MACHINE, Visibility.RENAME)

    def has(self, chunk: bytes) -> bool:
        """Whether the chunk is there, sound or not."""
        return chunk in self._chunks

    def list(self) -> Iterator[bytes]:
        """All names, oldest first."""
        return iter(list(self._chunks))

    def open(self, chunk: bytes) -> MemoryReader:
        """Errors: `DamagedError` with CHUNK_MISSING."""
        stored = self._chunks.get(chunk)
        if stored is None:
            raise DamagedError(Reason.CHUNK_MISSING, f"chunk {chunk.hex()[:16]} is not there", chunk=chunk.hex())
        return MemoryReader(stored, self.between)

    def write(
        self, identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]
    ) -> WriteReceipt:
        """Store a chunk whole; a sound one is kept. Errors: `StoreError` with STORE_FULL."""
        present = self._chunks.get(identity.digest)
        copies = [bytearray(b"".join(buffers)) for buffers in segments]
        nbytes = sum(map(len, copies))
        if present is not None and all(present.sound(layer) for layer in range(len(copies))):
            return WriteReceipt(WriteOutcome.ALREADY_PRESENT, 0, nbytes, 0.0, 0.0, 0.0)
        if present is None and len(self._chunks) >= self.limit:
            raise StoreError(Reason.STORE_FULL, f"{self.limit} chunks are all that fit", "remove some")
        checksums = tuple(map(xxh3_128_digest, copies))
        self.between()
        self._chunks[identity.digest] = _Stored(identity, layout, copies, checksums)
        outcome = WriteOutcome.WRITTEN if present is None else WriteOutcome.REPLACED
        return WriteReceipt(outcome, nbytes, nbytes, 0.0, 0.0, 0.0)

    def revoke(self, chunk: bytes) -> bool:
        """Forget the chunk; whoever has it open reads on."""
        return self._chunks.pop(chunk, None) is not None

    def content(self, chunk: bytes, layer: int) -> bytes | None:
        """What lies there, unverified, for comparing; `None` without a chunk."""
        stored = self._chunks.get(chunk)
        return None if stored is None else bytes(stored.segments[layer])

    def damage(self, chunk: bytes, layer: int, at: int, *, cut: bool) -> None:
        """Flip a bit of byte `at` of one layer, or let the layer end there."""
        payload = self._chunks[chunk].segments[layer]
        at %= max(1, len(payload))
        if cut:
            del payload[at:]
        elif payload:
            payload[at] ^= 1


class MemoryReader:
    """See `ChunkReader`."""

    def __init__(self, stored: _Stored, between: Callable[[], None]) -> None:
        self._stored = stored
        self._between = between
        self.identity = stored.identity
        self.layout = stored.layout
        self.layers = len(stored.segments)
        self.tokens = len(stored.identity.token_ids)
        self.segment_bytes = self.layout.segment_bytes
        self.nbytes = self.stored_bytes = self.layers * self.segment_bytes

    def read_into(self, layer: int, buffers: Sequence[memoryview]) -> int:
        """Errors: `DamagedError` with CHUNK_TRUNCATED or CHUNK_DAMAGED; the buffers hold what was there."""
        payload, start = self._stored.segments[layer], 0
        self._between()
        for buffer in buffers:
            part = payload[start : start + buffer.nbytes]
            buffer[: len(part)] = part
            start += len(part)
        name = self.identity.digest.hex()
        if start < self.segment_bytes:
            raise DamagedError(Reason.CHUNK_TRUNCATED, f"chunk {name[:16]} ends early", chunk=name)
        if xxh3_128_digest(b"".join(buffers)) != self._stored.checksums[layer]:
            raise DamagedError(Reason.CHUNK_DAMAGED, f"chunk {name[:16]} does not match its checksum", chunk=name)
        return start

    def checksum(self, layer: int) -> bytes:
        return self._stored.checksums[layer]

    def verify_payload(self) -> ReadReceipt:
        scratch = memoryview(bytearray(self.segment_bytes))
        for layer in range(self.layers):
            self.read_into(layer, [scratch])
        return ReadReceipt(self.nbytes, 0.0, 0.0)

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
