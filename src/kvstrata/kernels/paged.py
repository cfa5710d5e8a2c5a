"""Paged rows in plain PyTorch: the readable reference of the native kernels, and what runs without them.

Works on any device. Bit-exact for moving rows; for attention the reference is `PartialState.of_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.kernels.block_table import BlockTable
from kvstrata.kernels.state import PartialState

__all__ = ["append_rows", "attend_pages", "gather_rows", "segment_planes", "torch_dtype"]

PIECE_TOKENS = 2048
"""Tokens widened to fp32 at a time by `attend_pages`: bounds its workspace."""


def torch_dtype(layout: SegmentLayout) -> torch.dtype:
    """The PyTorch dtype of a layout's rows."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[layout.dtype]


def segment_planes(segment: Tensor, layout: SegmentLayout) -> tuple[Tensor, Tensor]:
    """K and V views [kv_heads, pages, page_tokens, head_dim] of a segment's bytes."""
    shape = (layout.kv_heads, layout.pages, 2, layout.page_tokens, layout.head_dim)
    planes = segment[: layout.segment_bytes].view(torch_dtype(layout)).view(shape)
    return planes[:, :, 0], planes[:, :, 1]


@dataclass(frozen=True)
class _Run:
    """Tokens [token, token + count) inside one segment: whole pages, or rows of a single page."""

    segment: int
    page: int
    pages: int
    row: int
    token: int
    count: int

    def of(self, plane: Tensor) -> Tensor:
        """The run's rows of a plane, [kv_heads, pages, rows, head_dim]."""
        return plane[:, self.page : self.page + self.pages, self.row : self.row + self.count // self.pages]

    def split(self, rows: Tensor) -> Tensor:
        """Rows [kv_heads, count, head_dim] as a view [kv_heads, pages, rows, head_dim]."""
        heads, row, element = rows.stride()
        each = self.count // self.pages
        return rows.as_strided((rows.shape[0], self.pages, each, rows.shape[2]), (heads, each * row, row, element))


def _runs(layout: SegmentLayout, start: int, stop: int) -> Iterator[_Run]:
    token = start
    while token < stop:
        segment, inside = divmod(token, layout.chunk_tokens)
        page, row = divmod(inside, layout.page_tokens)
        left = min(stop - token, layout.chunk_tokens - inside)
        pages = 1 if row else max(1, left // layout.page_tokens)
        count = min(left, pages * layout.page_tokens - row)
        yield _Run(segment, page, pages, row, token, count)
        token += count


def append_rows(table: BlockTable, key: Tensor, value: Tensor, start: int) -> None:
    """Writes `key` and `value` [kv_heads, n, head_dim] at token positions [start, start + n)."""
    layout = table.layout
    for run in _runs(layout, start, start + key.shape[1]):
        planes = segment_planes(table.segments[run.segment], layout)
        at = slice(run.token - start, run.token - start + run.count)
        for plane, rows in zip(planes, (key, value), strict=True):
            run.of(plane).copy_(run.split(rows[:, at]))


def gather_rows(table: BlockTable, start: int, stop: int, key: Tensor, value: Tensor) -> None:
    """Copies tokens [start, stop) to `key` and `value` [kv_heads, stop - start, head_dim], widened if fp32."""
    layout = table.layout
    for run in _runs(layout, start, stop):
        planes = segment_planes(table.segments[run.segment], layout)
        at = slice(run.token - start, run.token - start + run.count)
        for plane, rows in zip(planes, (key, value), strict=True):
            run.split(rows[:, at]).copy_(run.of(plane))


def attend_pages(table: BlockTable, query: Tensor, start: int, stop: int, scale: float) -> PartialState:
    """State [query_heads] of `query` [query_heads, head_dim] over tokens [start, stop)."""
    layout = table.layout
    grouped = query.view(layout.kv_heads, layout.query_group, layout.head_dim)
    state = PartialState.empty(layout.kv_heads, layout.query_group, head_dim=layout.head_dim, device=query.device)
    rows = torch.empty(
        (2, layout.kv_heads, min(PIECE_TOKENS, stop - start), layout.head_dim), dtype=torch.float32, device=query.device
    )
    for token in range(start, stop, PIECE_TOKENS):
        end = min(stop, token + PIECE_TOKENS)
        key, value = rows[0, :, : end - token], rows[1, :, : end - token]
        gather_rows(table, token, end, key, value)
        state = state.merge(PartialState.of_rows(grouped, key, value, scale))
    return PartialState(state.m.flatten(), state.l.flatten(), state.u.flatten(0, 1))
