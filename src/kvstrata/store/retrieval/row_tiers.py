"""Where rows are copied from: the segment of one layer of a chunk, in a memory arena or in a tier of whole chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from blake3 import blake3

from kvstrata.contract.capability import TierCapability
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import DamagedError, Reason, StateError
from kvstrata.store.buffers import sealed_pages
from kvstrata.store.directory import ChunkRecord
from kvstrata.tiers.chunk_format import payload_key
from kvstrata.tiers.interface import ChunkTier
from kvstrata.tiers.memory import MemoryArena

__all__ = ["ArenaRows", "ChunkTierRows", "RowTier", "payload_digest", "row_views"]


class RowTier(Protocol):
    """One tier that rows can be copied from. capability: what it can do."""

    @property
    def capability(self) -> TierCapability: ...

    def segment(self, record: ChunkRecord, layer: int) -> contextlib.AbstractContextManager[memoryview]:
        """The bytes of `layer`, all pages or those in use; they stay in place inside the block. May block on a read."""
        ...


class ArenaRows:
    """Rows of the segments that a memory arena holds."""

    def __init__(self, arena: MemoryArena, capability: TierCapability) -> None:
        self.arena = arena
        self.capability = capability

    @contextlib.contextmanager
    def segment(self, record: ChunkRecord, layer: int) -> Iterator[memoryview]:
        """Holds the slot, so that it cannot change hands meanwhile. Errors: `StateError` when it has none by now."""
        tier = self.capability.tier
        grant = next(replica.grants[layer] for replica in record.replicas if replica.tier == tier)
        if grant is None:
            raise StateError(
                Reason.REPLICA_MISSING,
                f"layer {layer} of chunk {record.digest.hex()[:16]} has left tier {tier!r}",
                "promote the rows first, or name another tier for them",
            )
        self.arena.hold(grant, record.key(layer))
        try:
            yield self.arena.backing.readable(grant.slot)
        finally:
            self.arena.let_go(grant)


class ChunkTierRows:
    """Rows of the chunks that a tier of whole chunks keeps, e.g. files; each read is a verified read of one layer."""

    def __init__(self, tier: ChunkTier, layout: SegmentLayout) -> None:
        self.tier = tier
        self.layout = layout
        self.capability = tier.capability

    @contextlib.contextmanager
    def segment(self, record: ChunkRecord, layer: int) -> Iterator[memoryview]:
        """Blocks on the read. Errors: as `ChunkReader.read_into`; `DamagedError` for a chunk in another layout."""
        with self.tier.open(record.digest) as reader:
            if reader.layout != self.layout:
                raise DamagedError(
                    Reason.CHUNK_FOREIGN,
                    f"chunk {record.digest.hex()[:16]} is stored in another layout: {reader.layout}",
                    chunk=record.digest.hex(),
                )
            buffer = memoryview(bytearray(reader.segment_bytes))
            reader.read_into(layer, [buffer])
        yield buffer


def row_views(segment: memoryview, layout: SegmentLayout, kv_head: int, row: int) -> tuple[memoryview, memoryview]:
    """K and V of one row of one head, `head_dim` elements each, as views into `segment`.

    row: from the start of the chunk. `segment` holds all pages of every head, or the same first pages of each.
    """
    head_bytes = segment.nbytes // layout.kv_heads
    page, token = divmod(row, layout.page_tokens)
    size = layout.head_dim * layout.itemsize
    start = kv_head * head_bytes + page * layout.page_bytes + token * size
    return segment[start : start + size], segment[start + layout.plane_bytes : start + layout.plane_bytes + size]


def payload_digest(record: ChunkRecord, tier: RowTier, layout: SegmentLayout) -> bytes:
    """The tenant's keyed BLAKE3 of all rows of a chunk as they lie in `tier`: equal in every tier. Reads all layers."""
    keyed = blake3(key=payload_key(record.identity.context.namespace))
    for layer in range(record.identity.context.abi.layers):
        with tier.segment(record, layer) as segment:
            whole = segment.nbytes == layout.segment_bytes
            for part in sealed_pages(segment, layout, len(record.identity.token_ids)) if whole else [segment]:
                keyed.update(part)
    return keyed.digest()
