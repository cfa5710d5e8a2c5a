"""Rows that lie anywhere in segments, collected into one tensor: K and V of the positions each owner names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.kernels.paged import segment_planes, torch_dtype

__all__ = ["SlotMemory", "gather_chosen"]


class SlotMemory:
    """Slots of equal stride in one flat tensor, so that rows of many segments are collected by one index operation.

    memory: one-dimensional uint8. stride: bytes from slot to slot. Without it rows are collected segment by segment.
    """

    def __init__(self, memory: Tensor, stride: int, layout: SegmentLayout) -> None:
        row = layout.head_dim * layout.itemsize
        self.usable = stride % row == 0 and memory.storage_offset() % row == 0
        self._layout = layout
        self._rows_per_slot = stride // row
        whole = memory[: memory.numel() // row * row].view(torch_dtype(layout)) if self.usable else None
        self._rows = None if whole is None else whole.view(-1, layout.head_dim)

    def gather(self, slots: Tensor, rows: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [owners, n, head_dim] of `rows` int64 [owners, n], whose chunk i lies in `slots`[i].

        heads: int64 [owners], the K/V head of each owner. Entries below 0 yield row 0 of their chunk.
        """
        assert self._rows is not None
        layout = self._layout
        position = rows.clamp_min(0)
        chunk = position.div(layout.chunk_tokens, rounding_mode="floor")
        inside = position - chunk * layout.chunk_tokens
        page = inside.div(layout.page_tokens, rounding_mode="floor")
        pages = layout.pages * 2 * layout.page_tokens
        index = slots[chunk] * self._rows_per_slot + heads.unsqueeze(-1) * pages
        index += page * (2 * layout.page_tokens) + inside - page * layout.page_tokens
        shape = (*rows.shape, layout.head_dim)
        flat = index.view(-1)
        keys = self._rows.index_select(0, flat).view(shape)
        values = self._rows.index_select(0, flat + layout.page_tokens).view(shape)
        return keys, values


def gather_chosen(
    segment: Callable[[int], Tensor], layout: SegmentLayout, rows: Tensor, heads: Tensor
) -> tuple[Tensor, Tensor]:
    """The readable reference of `SlotMemory.gather`: one segment after the other.

    segment: the uint8 tensor of a chunk by its number. Entries below 0 yield zeros.
    """
    device = rows.device
    shape = (*rows.shape, layout.head_dim)
    keys = torch.zeros(shape, dtype=torch_dtype(layout), device=device)
    values = torch.zeros_like(keys)
    chunks = rows.div(layout.chunk_tokens, rounding_mode="floor")
    each = heads.unsqueeze(-1).expand_as(rows)
    for chunk in torch.unique(chunks[rows >= 0]).tolist():
        here = (chunks == chunk) & (rows >= 0)
        inside = rows[here] - chunk * layout.chunk_tokens
        place = each[here], inside // layout.page_tokens, inside % layout.page_tokens
        for plane, out in zip(segment_planes(segment(chunk), layout), (keys, values), strict=True):
            out[here] = plane[place].to(device)
    return keys, values
