"""Shared pieces of the kernel tests: a float64 reference and filled block tables."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.kernels import BlockTable, available_levels

LEVELS = (*available_levels(), "torch")
DTYPES = ("float32", "bfloat16", "float16")
# Half a unit in the last place of outputs up to 4 in size, and fp32 rounding of sums.
TOLERANCE = {"float32": 3e-6, "bfloat16": 1.6e-2, "float16": 2e-3}


def table_of(layout: SegmentLayout, tokens: int, seed: int = 0) -> BlockTable:
    """A table for `tokens` tokens whose memory starts as noise, NaN patterns among it."""
    generator = torch.Generator().manual_seed(seed)
    table = BlockTable(layout)
    for _ in range(layout.segments(tokens)):
        table.append(torch.randint(0, 256, (layout.segment_bytes,), dtype=torch.uint8, generator=generator))
    return table


def rows_of(layout: SegmentLayout, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random key and value [1, kv_heads, tokens, d] and one query row [1, query_heads, 1, d]."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, layout.dtype)
    shapes = ((layout.kv_heads, tokens), (layout.kv_heads, tokens), (layout.query_heads, 1))
    key, value, query = (torch.randn(1, *shape, layout.head_dim, generator=generator).to(dtype) for shape in shapes)
    return key, value, query


def exact_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention in float64, the query rows last in the history: [1, n, query_heads, d]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = query.double() @ key.transpose(-1, -2) * scale
    rows, tokens = scores.shape[-2:]
    future = torch.ones(rows, tokens, dtype=torch.bool).triu(tokens - rows + 1)
    return (torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ value).transpose(1, 2)
