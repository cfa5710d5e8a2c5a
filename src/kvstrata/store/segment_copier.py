"""Segments of a chunk tier are read into the slots of an arena, each verified where it arrives."""

from __future__ import annotations

from typing import Protocol

from kvstrata.errors import DamagedError, Reason
from kvstrata.store.buffers import used_pages
from kvstrata.store.destinations import Destination, SlotDestination
from kvstrata.store.transfer_records import CopyEvent, CopyOrder
from kvstrata.tiers.interface import ChunkReader, ChunkTier

__all__ = ["ChunkSource", "OpenedEachTime", "SegmentCopier"]


class ChunkSource(Protocol):
    """Open chunks, handed out for one read at a time."""

    def check_out(self, chunk: bytes) -> ChunkReader:
        """The chunk, its header verified. Errors: as `ChunkTier.open`. Every call needs a `check_in`."""
        ...

    def check_in(self, reader: ChunkReader, /) -> None:
        """End of one use."""
        ...


class OpenedEachTime:
    """Opens the chunk for every segment: simple, and for callers that read each of them once."""

    def __init__(self, tier: ChunkTier) -> None:
        self._tier = tier

    def check_out(self, chunk: bytes) -> ChunkReader:
        return self._tier.open(chunk)

    def check_in(self, reader: ChunkReader, /) -> None:
        reader.close()


class SegmentCopier:
    """The `Copier` between a tier that verifies every read and a memory arena. Any number of threads."""

    def __init__(self, source: ChunkSource) -> None:
        self._source = source

    def read(self, order: CopyOrder) -> CopyEvent:
        """Segment i goes to slot i. Errors: `StoreError` of the first segment that cannot be read or is not right."""
        unit, target, nbytes = order.unit, order.into, 0
        assert isinstance(target, SlotDestination)
        backing, layout = target.arena.backing, unit.layout
        for segment, grant in zip(unit.segments, target.grants, strict=True):
            reader = self._source.check_out(segment.chunk)
            try:
                if reader.layout != layout or reader.identity.context.digest != unit.context:
                    raise DamagedError(
                        Reason.CHUNK_FOREIGN,
                        f"chunk {segment.chunk.hex()[:16]} is stored in another layout or context: {reader.layout}",
                        chunk=segment.chunk.hex(),
                    )
                nbytes += reader.read_into(
                    segment.layer, used_pages(backing.writable(grant.slot), layout, reader.tokens)
                )
                backing.flush(grant.slot)
            finally:
                self._source.check_in(reader)
        return CopyEvent(order.generation, nbytes, layout, unit.codec)

    def duplicate(self, source: Destination, target: Destination) -> None:
        """Slot by slot through host memory."""
        assert isinstance(source, SlotDestination)
        assert isinstance(target, SlotDestination)
        for origin, copy in zip(source.grants, target.grants, strict=True):
            target.arena.backing.writable(copy.slot)[:] = source.arena.backing.readable(origin.slot)
            target.arena.backing.flush(copy.slot)
