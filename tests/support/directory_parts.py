"""A directory over a small host arena, and histories whose rows are known bytes."""

from __future__ import annotations

from collections.abc import Sequence

from chunks_and_faults import LAYERS, LAYOUT, make_context

from kvstrata.contract.identity import ChunkContext
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.history import History
from kvstrata.tiers.memory import HostBacking, MemoryArena

SIZE = LAYOUT.chunk_tokens


def make_directory(slots: int = 12) -> Directory:
    return Directory(MemoryArena(LAYOUT.segment_bytes, HostBacking(LAYOUT.segment_bytes, slots)), LAYERS)


def make_ids(tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + i * 31 + 5) % 50000 for i in range(tokens)]


def segment_bytes(ids: Sequence[int], layer: int) -> bytes:
    """The bytes that stand for the rows of `ids` in one layer."""
    return bytes((token * 3 + layer * 101 + i) % 251 for i, token in enumerate(ids)) * (
        LAYOUT.segment_bytes // len(ids)
    ) + bytes(LAYOUT.segment_bytes % len(ids))


def extend(history: History, ids: Sequence[int]) -> list[ChunkRecord]:
    """Commit `ids`, a chunk at most, with their bytes in every layer."""
    assert history.extend_tail(len(ids))
    backing = history.directory.arena.backing
    for layer, grant in enumerate(history.tail[0].grants):
        backing.writable(grant.slot)[:] = segment_bytes(ids, layer)
    return history.commit(len(ids), ids)


def make_history(directory: Directory, chunks: int, seed: int = 0, context: ChunkContext | None = None) -> History:
    """`chunks` sealed chunks and no tail."""
    history = History(directory, context or make_context())
    for index in range(chunks):
        extend(history, make_ids(SIZE, seed + index))
    return history
