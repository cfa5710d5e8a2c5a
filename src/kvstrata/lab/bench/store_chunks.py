"""Chunks of given sizes for the store's benchmark: random rows, identities that no model computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvstrata.contract.identity import CacheAbi, ChunkContext, ChunkIdentity, ModelIdentity, PositionRule
from kvstrata.contract.layout import SegmentLayout

__all__ = ["BATCH_SHAPE", "SHAPES", "ChunkShape", "copy_rows", "random_rows"]


@dataclass(frozen=True)
class ChunkShape:
    """A geometry whose chunks have `layers` segments. name: the size of a chunk, as it stands in the figures."""

    name: str
    layers: int
    layout: SegmentLayout

    @property
    def nbytes(self) -> int:
        """Payload bytes of one chunk."""
        return self.layers * self.layout.segment_bytes

    @cached_property
    def context(self) -> ChunkContext:
        """What all its chunks have in common."""
        layout = self.layout
        return ChunkContext(
            ModelIdentity("id:bench"),
            CacheAbi(self.layers, layout.query_heads, layout.kv_heads, layout.head_dim, layout.dtype),
            PositionRule("default", 10000.0),
            chunk_tokens=layout.chunk_tokens,
        )

    def identity(self, number: int) -> ChunkIdentity:
        """The `number`-th chunk: the first of a history of its own."""
        return ChunkIdentity(self.context, b"", 0, (number, *range(1, self.layout.chunk_tokens)))


SHAPES = (
    ChunkShape("64KiB", 4, SegmentLayout(1, 1, 64, "bfloat16", chunk_tokens=64)),
    ChunkShape("1MiB", 8, SegmentLayout(2, 2, 64, "bfloat16", chunk_tokens=256)),
    ChunkShape("8MiB", 32, SegmentLayout(4, 4, 64, "bfloat16", chunk_tokens=256)),
)
"""Segments of 16, 128 and 256 KiB."""

BATCH_SHAPE = ChunkShape("192KiB", 4, SegmentLayout(3, 9, 64, "bfloat16", chunk_tokens=256))
"""Segments of 192 KiB: 256 tokens of one layer with three K/V heads of 64 elements."""


def random_rows(shape: ChunkShape, chunks: int, seed: int) -> list[list[memoryview]]:
    """`rows[chunk][layer]`: the bytes of every segment, all in memory at once."""
    source = np.random.default_rng(seed)
    size = shape.layout.segment_bytes
    flat = source.integers(0, 256, chunks * shape.nbytes, np.uint8).data
    return [
        [flat[start : start + size] for start in range(base, base + shape.nbytes, size)]
        for base in range(0, chunks * shape.nbytes, shape.nbytes)
    ]


def copy_rows(target: memoryview, source: memoryview) -> None:
    """What a careful copy of one segment is: NumPy's, which lets other threads run."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
