"""Sliding windows, attention sinks and score scales of decode and prefill, against float64 with an explicit mask."""

from __future__ import annotations

import pytest
import torch
from attention_reference import LEVELS, TOLERANCE, rows_of, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError
from kvstrata.kernels import BlockTable, DecodeAttention, PrefillWorkspace, prefill, prefill_attention

CHUNK, PAGE = 32, 16
WINDOWS = st.sampled_from([1, 2, PAGE, CHUNK - 1, CHUNK, CHUNK + 1, 75, 100_000])
PASTS = st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK - 1, 5 * CHUNK + 3])
GROUPS = st.sampled_from([1, 3, 4, 8])
DTYPES = st.sampled_from(["float32", "bfloat16"])
SCALES = st.sampled_from([0.31, 16**-0.5, 0.07])


def exact(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attention in float64, the n query rows last in the history: [1, n, query_heads, d]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = query.double() @ key.transpose(-1, -2) * scale
    rows, tokens = scores.shape[-2:]
    mask = torch.zeros(rows, tokens, dtype=torch.bool)
    for row in range(rows):
        position = tokens - rows + row
        mask[row, position + 1 :] = True
        if window is not None:
            mask[row, : max(0, position + 1 - window)] = True
    scores, value = scores.masked_fill(mask, -torch.inf), value.masked_fill(mask.all(0)[:, None], 0.0)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    return (torch.softmax(scores, dim=-1)[..., :tokens] @ value).transpose(1, 2)


def sinks_of(layout: SegmentLayout) -> Tensor:
    return torch.linspace(-2.0, 4.0, layout.query_heads)


def poison(attention: DecodeAttention, table: BlockTable, stop: int) -> None:
    """NaN in every row before `stop`; whole segments before it become one slot without rows, at no valid address."""
    layout = table.layout
    shape = (1, layout.kv_heads, stop, layout.head_dim)
    rows = torch.full(shape, torch.nan, dtype=getattr(torch, layout.dtype))
    attention.append(rows, rows, table, 0)
    placeholder = torch.full((layout.segment_bytes,), 0xFF, dtype=torch.uint8)
    for index in range(stop // layout.chunk_tokens):
        table.replace(index, placeholder, 0)


@pytest.mark.parametrize("level", LEVELS)
@given(past=PASTS, window=WINDOWS, group=GROUPS, dtype=DTYPES, scale=SCALES, with_sinks=st.booleans())
@settings(max_examples=60)
def test_decode_matches_float64(
    level: str, past: int, window: int, group: int, dtype: str, scale: float, with_sinks: bool
) -> None:
    layout = SegmentLayout(2, 2 * group, 16, dtype, chunk_tokens=CHUNK, page_tokens=PAGE)
    attention = DecodeAttention(layout, threads=2, level=level)
    key, value, query = rows_of(layout, past + 1, seed=past)
    table = table_of(layout, past + 1)
    attention.append(key[:, :, :past], value[:, :, :past], table, 0)
    start = max(0, past + 1 - window)
    poison(attention, table, start)
    sinks = sinks_of(layout) if with_sinks else None
    out = attention.append_and_attend(
        key[:, :, past:], value[:, :, past:], query, table, past, scale=scale, start=start, sinks=sinks
    )
    expected = exact(query, key, value, scale, window, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(out, attention.attend(query, table, past + 1, scale=scale, start=start, sinks=sinks))
    state = attention.partial(query, table, start, past + 1, scale=scale)
    state = state if sinks is None else state.with_sinks(sinks)
    torch.testing.assert_close(state.output()[None, None].double(), expected, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("flash", [True, False])
@given(
    past=PASTS,
    rows=st.integers(1, 70),
    window=st.none() | WINDOWS,
    group=GROUPS,
    dtype=DTYPES,
    scale=SCALES,
    with_sinks=st.booleans(),
    piece=st.sampled_from([1, 7, CHUNK + 1, 2048]),
)
@settings(max_examples=120)
def test_prefill_matches_float64_and_decode(
    flash: bool,
    past: int,
    rows: int,
    window: int | None,
    group: int,
    dtype: str,
    scale: float,
    with_sinks: bool,
    piece: int,
) -> None:
    layout = SegmentLayout(2, 2 * group, 16, dtype, chunk_tokens=CHUNK, page_tokens=PAGE)
    attention = DecodeAttention(layout, threads=1, level=LEVELS[0])
    key, value, _ = rows_of(layout, past + rows, seed=past + rows)
    query = torch.randn(1, rows, 2 * group, 16, generator=torch.Generator().manual_seed(1)).to(key.dtype)
    query = query.transpose(1, 2)
    sinks = sinks_of(layout) if with_sinks else None
    table = table_of(layout, past)
    attention.append(key[:, :, :past], value[:, :, :past], table, 0)
    if window is not None:
        poison(attention, table, max(0, past + 1 - window))
    with pytest.MonkeyPatch.context() as patch:
        if not flash:
            patch.setattr(prefill, "_flash", lambda: None)
        out = prefill_attention(
            query,
            table,
            past,
            key[:, :, past:],
            value[:, :, past:],
            scale,
            attention.gather,
            PrefillWorkspace(layout, rows + 3, piece),
            window=window,
            sinks=sinks,
        )
    assert out.is_contiguous()
    assert out.dtype == key.dtype
    expected = exact(query, key, value, scale, window, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])

    table = table_of(layout, past + rows)
    attention.append(key, value, table, 0)
    for row in {0, rows // 2, rows - 1}:
        stop = past + row + 1
        start = 0 if window is None else max(0, stop - window)
        one = attention.attend(query[:, :, row : row + 1], table, stop, scale=scale, start=start, sinks=sinks)
        # Both are rounded to the cache dtype.
        torch.testing.assert_close(out[:, row : row + 1], one, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_rows_of_256_and_query_groups(level: str, dtype: str, group: int) -> None:
    layout = SegmentLayout(2, 2 * group, 256, dtype)
    attention = DecodeAttention(layout, threads=2, level=level)
    tokens, rows, window = 700, 40, 300
    key, value, _ = rows_of(layout, tokens)
    query = torch.randn(1, 2 * group, rows, 256, generator=torch.Generator().manual_seed(1)).to(key.dtype)
    table = table_of(layout, tokens)
    attention.append(key, value, table, 0)
    sinks = sinks_of(layout)
    expected = exact(query, key, value, 0.0625, window, sinks)
    one = attention.attend(query[:, :, -1:], table, tokens, scale=0.0625, start=tokens - window, sinks=sinks)
    torch.testing.assert_close(one.double(), expected[:, -1:], rtol=0, atol=TOLERANCE[dtype])
    past = tokens - rows
    new, workspace = (key[:, :, past:], value[:, :, past:]), PrefillWorkspace(layout, rows)
    out = prefill_attention(query, table, past, *new, 0.0625, attention.gather, workspace, window=window, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("level", LEVELS)
def test_only_tokens_that_a_window_sees_are_gathered(level: str) -> None:
    layout = SegmentLayout(1, 2, 16, "bfloat16", chunk_tokens=CHUNK, page_tokens=PAGE)
    attention = DecodeAttention(layout, level=level)
    past, rows, window = 400, 100, 40
    key, value, _ = rows_of(layout, past + rows)
    table = table_of(layout, past)
    attention.append(key[:, :, :past], value[:, :, :past], table, 0)
    asked: list[tuple[int, int]] = []

    def gather(table: BlockTable, start: int, stop: int, out_k: Tensor, out_v: Tensor) -> None:
        asked.append((start, stop))
        attention.gather(table, start, stop, out_k, out_v)

    query = torch.zeros(1, 2, rows, 16, dtype=torch.bfloat16)
    new, workspace = (key[:, :, past:], value[:, :, past:]), PrefillWorkspace(layout, rows, 16)
    prefill_attention(query, table, past, *new, 1.0, gather, workspace, window=window)
    assert {token for start, stop in asked for token in range(start, stop)} == set(range(past + 1 - window, past))
    assert max(stop - start for start, stop in asked) <= 16


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_sinks(level: str) -> None:
    layout = SegmentLayout(1, 3, 16, "float32")
    attention = DecodeAttention(layout, level=level)
    key, value, query = rows_of(layout, 100)
    table = table_of(layout, 100)
    attention.append(key, value, table, 0)
    sinks = torch.tensor([-torch.inf, -1e4, 1e4])
    out, plain = attention.attend(query, table, 100, sinks=sinks), attention.attend(query, table, 100)
    assert torch.equal(out[:, :, :2], plain[:, :, :2])
    assert torch.equal(out[:, :, 2], torch.zeros(1, 1, 16))
    assert torch.equal(attention.attend(query, table, 0, sinks=sinks), torch.zeros(1, 1, 3, 16))
    new = (key[:, :, 99:], value[:, :, 99:])
    workspace = PrefillWorkspace(layout, 1)
    rows = prefill_attention(query, table, 99, *new, 0.25, attention.gather, workspace, sinks=sinks)
    torch.testing.assert_close(rows, out, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("level", LEVELS)
def test_sinks_of_any_dtype_and_stride(level: str) -> None:
    layout = SegmentLayout(2, 8, 16, "bfloat16")
    attention = DecodeAttention(layout, level=level)
    key, value, query = rows_of(layout, 50)
    table = table_of(layout, 50)
    attention.append(key, value, table, 0)
    wide = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected = attention.attend(query, table, 50, sinks=wide[:, 1].float().contiguous())
    assert torch.equal(attention.attend(query, table, 50, sinks=wide[:, 1]), expected)
    for dtype in (torch.bfloat16, torch.float32):
        parameter = torch.nn.Parameter(wide[:, 1].to(dtype))
        out = attention.append_and_attend(key[:, :, 49:], value[:, :, 49:], query, table, 49, sinks=parameter)
        assert torch.equal(out, expected)
        assert not out.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_misuse_is_refused_by_name(level: str) -> None:
    layout = SegmentLayout(1, 2, 16, "float32")
    attention = DecodeAttention(layout, level=level)
    key, value, query = rows_of(layout, 1)
    table = table_of(layout, 256)
    before = table.segments[0].clone()
    with pytest.raises(ConfigurationError, match="start must be from 0 to the position 7, got 8"):
        attention.append_and_attend(key, value, query, table, 7, start=8)
    with pytest.raises(ConfigurationError, match="start must be from 0 to the position 7, got -1"):
        attention.append_and_attend(key, value, query, table, 7, start=-1)
    assert torch.equal(table.segments[0], before)
    with pytest.raises(ConfigurationError, match=r"got \[9, 8\)"):
        attention.attend(query, table, 8, start=9)
    for call in (
        lambda: attention.append_and_attend(key, value, query, table, 0, sinks=torch.zeros(3)),
        lambda: attention.attend(query, table, 1, sinks=torch.zeros(3)),
        lambda: prefill_attention(
            query, table, 0, key, value, 1.0, attention.gather, PrefillWorkspace(layout, 1), sinks=torch.zeros(3)
        ),
    ):
        with pytest.raises(ConfigurationError, match=r"sinks must be .*2.*, got \(3,\)"):
            call()
    with pytest.raises(ConfigurationError, match="window must be at least 1, got 0"):
        prefill_attention(query, table, 0, key, value, 1.0, attention.gather, PrefillWorkspace(layout, 1), window=0)
