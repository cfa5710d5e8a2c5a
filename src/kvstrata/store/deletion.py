"""Removing chunks from a store that others have open: first the rows say so, then the files go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvstrata.errors import Reason
from kvstrata.store.catalog import Catalog

__all__ = ["EvictResult", "Refusal", "evict"]

_AT_ONCE = 64
"""Chunks in one transaction: files are unlinked under the catalog's write lock, and other writers wait that long."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one chunk was not removed."""

    chunk: bytes
    reason: Reason
    cause: str


@dataclass(frozen=True, slots=True)
class EvictResult:
    """Which chunks are gone, the bytes of their files, and which were refused."""

    removed: tuple[bytes, ...]
    bytes_freed: int
    refused: tuple[Refusal, ...]


def evict(catalog: Catalog, chunks: Collection[bytes]) -> EvictResult:
    """Remove those of `chunks` that are published and not pinned. Blocks. Errors: `StoreError`.

    Killed in between, the next one who opens the store finishes what was begun.
    """
    pending = list(dict.fromkeys(chunks))
    removed: list[bytes] = []
    refused: list[Refusal] = []
    freed = 0
    for first in range(0, len(pending), _AT_ONCE):
        rows, kept = catalog.journal.start_deleting(pending[first : first + _AT_ONCE], catalog.pins.reason_to_keep)
        for chunk, words in kept.items():
            reason = Reason.CHUNK_PINNED if words else Reason.CHUNK_MISSING
            refused.append(Refusal(chunk, reason, f"chunk {chunk.hex()}: {words or 'it is not published'}"))
        freed += catalog.journal.finish_deleting([row.chunk for row in rows])
        removed += [row.chunk for row in rows]
    return EvictResult(tuple(removed), freed, tuple(refused))
