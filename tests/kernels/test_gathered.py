"""Rows collected by one index operation are those collected segment by segment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.kernels.gathered import SlotMemory, gather_chosen
from kvstrata.kernels.paged import torch_dtype

NO_ROW = -1


def filled(layout: SegmentLayout, slots: int, stride: int, seed: int) -> Tensor:
    """Slots of rows that are all different, with bytes that are no numbers between them."""
    memory = torch.full((slots * stride,), 255, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for slot in range(slots):
        rows = torch.randn(layout.segment_bytes // layout.itemsize, generator=generator).to(torch_dtype(layout))
        memory[slot * stride : slot * stride + layout.segment_bytes] = rows.view(torch.uint8)
    return memory


@given(
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 16, 64, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    pages=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 16, 64]),
    owners=st.sampled_from(["kv_heads", "query_heads", "one"]),
    count=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_slot_memory_equals_the_reference(
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: str,
    pages: int,
    page_tokens: int,
    owners: str,
    count: int,
    seed: int,
) -> None:
    layout = SegmentLayout(kv_heads, kv_heads * group, head_dim, dtype, pages * page_tokens, page_tokens)
    stride = -(-layout.segment_bytes // 4096) * 4096
    memory = filled(layout, 5, stride, seed)
    slots = torch.tensor([3, 0, 4, 1])
    each = {"kv_heads": kv_heads, "query_heads": kv_heads * group, "one": 1}[owners]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 4 * layout.chunk_tokens, (each, count), generator=generator)
    absent = torch.rand(each, count, generator=generator) < 0.2
    heads = torch.arange(each) // max(1, each // kv_heads)
    fast = SlotMemory(memory, stride, layout)
    assert fast.usable
    keys, values = fast.gather(slots, rows.masked_fill(absent, NO_ROW), heads)

    def segment(chunk: int) -> Tensor:
        start = int(slots[chunk]) * stride
        return memory[start : start + layout.segment_bytes]

    expected = gather_chosen(segment, layout, rows.masked_fill(absent, NO_ROW), heads)
    for found, wanted in zip((keys, values), expected, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype) == ((each, count, head_dim), found.dtype)
        assert torch.equal(found[~absent], wanted[~absent])
        assert not wanted[absent].any()
        assert torch.isfinite(found).all(), "what stands for no row is a row"


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "usable"),
    [(1, 24, "bfloat16", False), (1, 12, "float32", False), (3, 72, "float16", False), (2, 24, "bfloat16", True)],
)
def test_rows_that_do_not_divide_the_stride_are_left_to_the_reference(
    kv_heads: int, head_dim: int, dtype: str, usable: bool
) -> None:
    layout = SegmentLayout(kv_heads, kv_heads, head_dim, dtype, 64, 64)
    stride = -(-layout.segment_bytes // 4096) * 4096
    assert SlotMemory(torch.zeros(2 * stride, dtype=torch.uint8), stride, layout).usable is usable


def test_a_memory_that_begins_inside_a_row_is_left_to_the_reference() -> None:
    layout = SegmentLayout(1, 1, 16, "float32", 64, 64)
    memory = torch.zeros(2 * layout.segment_bytes, dtype=torch.uint8)
    assert not SlotMemory(memory[4:], layout.segment_bytes, layout).usable
    assert SlotMemory(memory[64:], layout.segment_bytes, layout).usable
