"""What the store needs of a tier that keeps whole chunks: files, a shared engine, or a wrapper around either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from kvstrata.contract.capability import TierCapability
from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.layout import SegmentLayout

if TYPE_CHECKING:
    from types import TracebackType

    from kvstrata.tiers.chunk_file import ReadReceipt
    from kvstrata.tiers.chunk_writer import ChunkRows
    from kvstrata.tiers.files import WriteReceipt

__all__ = ["BatchTier", "ChunkReader", "ChunkTier"]


class ChunkReader(Protocol):
    """One chunk, its header verified, open for reading. Any number of threads may read at once.

    identity, layout: what it is and how its segments lie. layers: segments. tokens: rows. segment_bytes: payload bytes
    of one layer. nbytes: of all. stored_bytes: what the chunk takes in the tier, header and padding included.
    """

    identity: ChunkIdentity
    layout: SegmentLayout
    layers: int
    tokens: int
    segment_bytes: int
    nbytes: int
    stored_bytes: int

    def read_into(self, layer: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` with the segment of `layer` and verify it; blocks; returns the bytes read. Errors: as
        `ChunkFile.read_into`."""
        ...

    def checksum(self, layer: int) -> bytes:
        """The xxh3_128 that `read_into` holds the segment of `layer` to."""
        ...

    def verify_payload(self) -> ReadReceipt:
        """Read and verify everything once. Blocks. Errors: as `read_into`."""
        ...

    def close(self) -> None:
        """Refuse further reads. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ChunkTier(Protocol):
    """Chunks by name. Safe for several threads; every call blocks; every read is verified.

    capability: what the tier can do. durable: a published chunk has reached the medium. read_only: writes are refused.
    """

    @property
    def capability(self) -> TierCapability: ...

    @property
    def durable(self) -> bool: ...

    @property
    def read_only(self) -> bool: ...

    def has(self, chunk: bytes) -> bool:
        """Whether a chunk of that name is published. A hit, not yet an arrival."""
        ...

    def list(self) -> Iterator[bytes]:
        """Names of all published chunks, in no particular order."""
        ...

    def open(self, chunk: bytes) -> ChunkReader:
        """Verify the header of `chunk`; the caller closes the reader. Errors: as `FileTier.open`."""
        ...

    def write(
        self, identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]
    ) -> WriteReceipt:
        """Store one chunk whole, or raise and leave nothing visible. Errors: as `FileTier.write`."""
        ...

    def revoke(self, chunk: bytes) -> bool:
        """Take a damaged chunk out of use; whether there was one."""
        ...


@runtime_checkable
class BatchTier(ChunkTier, Protocol):
    """A tier in which several chunks share the cost of a transaction."""

    def write_all(self, chunks: Sequence[ChunkRows]) -> Sequence[WriteReceipt]:
        """Store several chunks; after an error any of them may be there, whole. Errors: as `FileTier.write_all`."""
        ...
