"""One chunk on its way into a file: described, copied, read back.

The whole file goes to the system in one call: page by page and segment by segment costs a quarter more.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_128_digest

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.ports import Clock
from kvstrata.tiers.chunk_format import ALIGNMENT, Header, file_bytes_of, payload_bytes
from kvstrata.tiers.filesystem import FileSystem, read_fully, write_fully
from kvstrata.tiers.journal import WriteOutcome

__all__ = ["ChunkRows", "Draft", "read_back"]

ChunkRows = tuple[ChunkIdentity, SegmentLayout, Sequence[Sequence[memoryview]]]
"""A chunk, how each of its segments lies, and for each layer the C-contiguous buffers that hold its bytes."""

_PADDING = memoryview(bytes(ALIGNMENT))


class Draft:
    """A chunk that is being written. Seconds are what each step took; `outcome` is what became of it.

    Errors: `ConfigurationError` for segments that do not fit identity and layout.
    """

    def __init__(self, chunk: ChunkRows) -> None:
        self.identity, self.layout, segments = chunk
        self.chunk = self.identity.digest
        self.sources = _as_bytes(self.identity, self.layout, segments)
        self.payload_bytes = len(self.sources) * payload_bytes(self.layout, len(self.identity.token_ids))
        self.file_bytes = file_bytes_of(self.identity, self.layout, len(self.sources))
        self.header: Header | None = None
        self.fd: int | None = None
        self.met = WriteOutcome.WRITTEN
        self.outcome: WriteOutcome | None = None
        self.checksum_seconds = self.write_seconds = self.validate_seconds = 0.0

    def copy(self, files: FileSystem, fd: int, clock: Clock) -> Header:
        """Fill the empty file `fd`, which `close` gives back, and read it back. Blocks. Errors: `OSError`;
        `ValueError` for bytes that are others than what was written."""
        self.fd = fd
        start = clock()
        self.header = header = Header.of(self.identity, self.layout, self.sources)
        copying = clock()
        files.allocate(fd, header.file_bytes)
        write_fully(files, fd, self._in_order(header), 0)
        validating = clock()
        read_back(files, fd, header)
        self.checksum_seconds += copying - start
        self.write_seconds += validating - copying
        self.validate_seconds += clock() - validating
        return header

    def close(self, files: FileSystem) -> None:
        """Let go of the file. Idempotent. Errors: `OSError`."""
        fd, self.fd = self.fd, None
        if fd is not None:
            files.close(fd)

    def _in_order(self, header: Header) -> list[memoryview]:
        position = header.offsets[0]
        buffers = [memoryview(header.encode().ljust(position, b"\0"))]
        for entry, parts in zip(header.segments, self.sources, strict=True):
            if entry.offset > position:
                buffers.append(_PADDING[: entry.offset - position])
            buffers += parts
            position = entry.offset + entry.length
        return buffers


def read_back(files: FileSystem, fd: int, header: Header) -> None:
    """Hold a file that was just written to its header, byte for byte, and every segment to its checksum. Blocks.

    Errors: `OSError`; `ValueError` that says what differs.
    """
    size = files.size(fd)
    if size != header.file_bytes:
        raise ValueError(f"it has {size} of {header.file_bytes} bytes")
    wanted = header.encode()
    found = bytearray(len(wanted))
    if read_fully(files, fd, [memoryview(found)], 0, len(found)) != len(found) or found != wanted:
        raise ValueError("its header is not the one that was written")
    length = header.segments[0].length
    scratch = [memoryview(bytearray(length))]
    for layer, entry in enumerate(header.segments):
        done = read_fully(files, fd, scratch, entry.offset, length)
        if done != length or xxh3_128_digest(scratch[0]) != entry.checksum:
            raise ValueError(f"layer {layer} does not match its checksum")


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
        found = sum([buffer.nbytes for buffer in buffers])
        if found != wanted or not all(buffer.c_contiguous for buffer in buffers):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"segments[{layer}] must be {wanted} contiguous bytes, found {found} bytes"
            )
    return [[buffer.cast("B") for buffer in buffers] for buffers in segments]
