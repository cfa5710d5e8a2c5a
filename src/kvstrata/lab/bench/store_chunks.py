"""Chunks of chosen sizes for the store's benchmarks."""

from __future__ import annotations

import random

from kvstrata.contract.identity import CacheAbi, ChunkContext, ChunkIdentity, ModelIdentity, PositionRule
from kvstrata.contract.layout import SegmentLayout

__all__ = ["make_identity", "make_layout", "make_segments"]


def make_layout(segment_bytes: int) -> SegmentLayout:
    """One K/V head of 64 fp32 elements, with as many tokens as give `segment_bytes`."""
    tokens = segment_bytes // 512
    return SegmentLayout(1, 1, 64, "float32", chunk_tokens=tokens, page_tokens=min(64, tokens))


def make_identity(layout: SegmentLayout, layers: int, number: int) -> ChunkIdentity:
    """The first chunk of a history of its own."""
    abi = CacheAbi(layers, layout.query_heads, layout.kv_heads, layout.head_dim, layout.dtype)
    context = ChunkContext(
        ModelIdentity("id:bench"), abi, PositionRule("default", 10000.0), chunk_tokens=layout.chunk_tokens
    )
    return ChunkIdentity(context, b"", 0, tuple(range(number, number + layout.chunk_tokens)))


def make_segments(layout: SegmentLayout, layers: int, seed: int = 0) -> list[list[memoryview]]:
    """Random rows of every layer."""
    source = random.Random(seed)  # noqa: S311 - filler, not a secret
    return [[memoryview(bytearray(source.randbytes(layout.segment_bytes)))] for _ in range(layers)]
