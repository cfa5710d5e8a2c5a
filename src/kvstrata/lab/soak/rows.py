"""What every row must be: bytes that depend on its tenant, on all tokens up to it, and on its layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from kvstrata.contract.identity import CacheAbi, ChunkContext, ChunkIdentity, ModelIdentity, Namespace, PositionRule
from kvstrata.contract.layout import SegmentLayout

__all__ = ["CONTEXTS", "LAYERS", "LAYOUT", "SIZE", "Truth", "first_state", "next_state", "segment", "write_row"]

LAYERS = 2
LAYOUT = SegmentLayout(kv_heads=1, query_heads=1, head_dim=8, dtype="float16", chunk_tokens=4, page_tokens=2)
SIZE = LAYOUT.chunk_tokens

_ROW = LAYOUT.head_dim * LAYOUT.itemsize


def _context(tenant: str) -> ChunkContext:
    return ChunkContext(
        ModelIdentity("id:soak"),
        CacheAbi(LAYERS, LAYOUT.query_heads, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.dtype),
        PositionRule("default", 10000.0),
        Namespace(tenant),
        chunk_tokens=SIZE,
    )


CONTEXTS = (_context("first"), _context("second"))
"""Two tenants whose tokens are the same and whose rows are not."""


@dataclass(frozen=True, slots=True)
class Truth:
    """A sealed chunk: its name, the state after each of its rows, and the bytes of each of its layers."""

    identity: ChunkIdentity
    states: tuple[bytes, ...]
    segments: tuple[bytes, ...]


def first_state(context: ChunkContext) -> bytes:
    """The state before the first row of a history of `context`."""
    return xxh3_128_digest(context.digest)


def next_state(state: bytes, token: int) -> bytes:
    """The state after one more token."""
    return xxh3_128_digest(state + token.to_bytes(4, "little"))


def write_row(slot: memoryview, row: int, state: bytes, layer: int) -> None:
    """Write both planes of one row into a segment in `LAYOUT`; row: its place in the chunk."""
    start = row // LAYOUT.page_tokens * LAYOUT.page_bytes + row % LAYOUT.page_tokens * _ROW
    for plane in range(2):
        slot[start : start + _ROW] = xxh3_128_digest(state, seed=2 * layer + plane)
        start += LAYOUT.plane_bytes


def segment(states: Sequence[bytes], layer: int) -> bytes:
    """The bytes of the rows after `states` in `layer`; places without a row are zero."""
    slot = memoryview(bytearray(LAYOUT.segment_bytes))
    for row, state in enumerate(states):
        write_row(slot, row, state, layer)
    return bytes(slot)
