"""Decode attention of every level against float64, and what it promises beyond the numbers."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from attention_reference import DTYPES, LEVELS, TOLERANCE, exact_attention, rows_of, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError
from kvstrata.kernels import BlockTable, DecodeAttention, PartialState

NATIVE = [level for level in LEVELS if level != "torch"]
SHAPES = [(3, 1, 64), (3, 3, 64), (2, 4, 128), (1, 7, 80), (2, 2, 256), (1, 5, 24), (2, 8, 8), (1, 9, 96)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), SHAPES)
def test_append_and_attend_matches_float64(level: str, dtype: str, kv_heads: int, group: int, dim: int) -> None:
    layout = SegmentLayout(kv_heads, kv_heads * group, dim, dtype)
    attention = DecodeAttention(layout, threads=2, level=level)
    for tokens in (1, 2, 63, 64, 65, 255, 256, 257, 1000):
        key, value, query = rows_of(layout, tokens, seed=tokens)
        table = table_of(layout, tokens)
        attention.append(key[:, :, :-1], value[:, :, :-1], table, 0)
        out = attention.append_and_attend(key[:, :, -1:], value[:, :, -1:], query, table, tokens - 1)
        assert out.shape == (1, 1, layout.query_heads, dim)
        assert out.is_contiguous()
        expected = exact_attention(query, key, value, dim**-0.5)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])
        assert torch.equal(out, attention.attend(query, table, tokens))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("chunk_tokens", "page_tokens"), [(64, 64), (48, 16), (384, 128), (10, 5)])
def test_other_page_and_chunk_sizes(level: str, chunk_tokens: int, page_tokens: int) -> None:
    layout = SegmentLayout(2, 6, 16, "float32", chunk_tokens=chunk_tokens, page_tokens=page_tokens)
    attention = DecodeAttention(layout, threads=1, level=level)
    key, value, query = rows_of(layout, 700)
    table = table_of(layout, 700)
    attention.append(key, value, table, 0)
    for tokens in (1, 5, 47, 129, 385, 700):
        expected = exact_attention(query, key[:, :, :tokens], value[:, :, :tokens], 0.25)
        torch.testing.assert_close(attention.attend(query, table, tokens).double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_addresses(level: str, dtype: str) -> None:
    layout = SegmentLayout(3, 9, 64, dtype)
    tokens = 4321
    key, value, query = rows_of(layout, tokens)
    results = []
    for threads in (1, 2, 3, 5):
        attention = DecodeAttention(layout, threads=threads, level=level)
        table = BlockTable(layout)
        for i in range(layout.segments(tokens)):
            # Slots at odd places of one arena: every segment has its own alignment.
            lead = (i * 7 + threads) % 32 * layout.itemsize
            table.append(torch.empty(lead + layout.segment_bytes, dtype=torch.uint8)[lead:])
        attention.append(key, value, table, 0)
        results.append(attention.attend(query, table, tokens))
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("level", NATIVE)
def test_fp32_error_is_no_worse_than_pytorch(level: str) -> None:
    layout = SegmentLayout(3, 9, 64, "float32")
    tokens = 6144
    key, value, query = rows_of(layout, tokens)
    attention = DecodeAttention(layout, level=level)
    table = table_of(layout, tokens)
    attention.append(key, value, table, 0)
    expected = exact_attention(query, key, value, 0.125)
    ours = (attention.attend(query, table, tokens).double() - expected).pow(2).mean().sqrt()
    folded = torch.nn.functional.scaled_dot_product_attention(query.view(1, 3, 3, 64), key, value)
    theirs = (folded.reshape(expected.shape).double() - expected).pow(2).mean().sqrt()
    assert ours <= 1.2 * theirs


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("factor", [1e3, 1e4, 1e18])
def test_huge_logits_do_not_overflow(level: str, factor: float) -> None:
    layout = SegmentLayout(1, 2, 32, "float32")
    attention = DecodeAttention(layout, threads=1, level=level)
    key, value, query = rows_of(layout, 300)
    table = table_of(layout, 300)
    attention.append(key * factor, value, table, 0)
    expected = exact_attention(query, key * factor, value, layout.head_dim**-0.5)
    torch.testing.assert_close(attention.attend(query, table, 300).double(), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_scores_of_minus_infinity_weigh_nothing(level: str) -> None:
    layout = SegmentLayout(1, 1, 8, "float32")
    attention = DecodeAttention(layout, threads=1, level=level, scale=1.0)
    table = table_of(layout, 130)
    key = torch.zeros(1, 1, 130, 8)
    key[0, 0, :129, 0] = -torch.inf
    value = torch.arange(130.0).view(1, 1, 130, 1).expand(1, 1, 130, 8)
    query = torch.ones(1, 1, 1, 8)
    attention.append(key, value, table, 0)
    assert torch.equal(attention.attend(query, table, 130), torch.full((1, 1, 1, 8), 129.0))
    nothing = attention.partial(query, table, 0, 129)
    assert nothing.m.item() == -torch.inf
    assert nothing.l.item() == 0.0
    assert torch.equal(nothing.u, torch.zeros(1, 8))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", ["key", "value", "query"])
def test_nan_is_passed_on(level: str, place: str) -> None:
    layout = SegmentLayout(1, 2, 16, "bfloat16")
    attention = DecodeAttention(layout, threads=1, level=level)
    rows = dict(zip(("key", "value", "query"), rows_of(layout, 100), strict=True))
    rows[place][0, 0, -1] = torch.nan
    table = table_of(layout, 100)
    attention.append(rows["key"], rows["value"], table, 0)
    assert attention.attend(rows["query"], table, 100)[0, 0, 0].isnan().all()


@pytest.mark.parametrize("level", LEVELS)
def test_empty_range(level: str) -> None:
    layout = SegmentLayout(2, 6, 64, "float16")
    attention = DecodeAttention(layout, threads=1, level=level)
    _, _, query = rows_of(layout, 1)
    state = attention.partial(query, BlockTable(layout), 0, 0)
    assert torch.equal(state.m, torch.full((6,), -torch.inf))
    assert torch.equal(state.l, torch.zeros(6))
    assert torch.equal(state.u, torch.zeros(6, 64))
    assert torch.equal(attention.attend(query, BlockTable(layout), 0), torch.zeros(1, 1, 6, 64, dtype=torch.float16))


@pytest.mark.parametrize("level", LEVELS)
@given(data=st.data(), tokens=st.integers(1, 1500))
@settings(max_examples=25)
def test_states_of_any_split_merge_to_the_whole(level: str, data: st.DataObject, tokens: int) -> None:
    layout = SegmentLayout(2, 6, 16, "float32")
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    attention = DecodeAttention(layout, threads=1, level=level)
    key, value, query = rows_of(layout, tokens, seed=tokens)
    table = table_of(layout, tokens)
    attention.append(key * 8, value, table, 0)
    merged = PartialState.empty(6, head_dim=16)
    for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True):
        merged = merged.merge(attention.partial(query, table, start, stop))
    whole = attention.partial(query, table, 0, tokens)
    torch.testing.assert_close(merged.m + merged.l.log(), whole.m + whole.l.log(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(merged.output(), whole.output(), rtol=0, atol=3e-6)
    torch.testing.assert_close(merged.output()[None, None], attention.attend(query, table, tokens), rtol=0, atol=3e-6)


def _segment_bytes(table: BlockTable) -> Tensor:
    return torch.stack([segment.clone() for segment in table.segments])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", NATIVE)
@given(start=st.integers(0, 300), rows=st.integers(0, 400), strided=st.booleans())
@settings(max_examples=20)
def test_append_moves_the_same_bytes_as_the_reference(
    level: str, dtype: str, start: int, rows: int, strided: bool
) -> None:
    layout = SegmentLayout(3, 3, 24, dtype)
    key, value, _ = rows_of(layout, rows, seed=rows)
    if strided:
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    native, reference = table_of(layout, start + rows, seed=1), table_of(layout, start + rows, seed=1)
    DecodeAttention(layout, level=level).append(key, value, native, start)
    DecodeAttention(layout, level="torch").append(key, value, reference, start)
    if len(native):
        assert torch.equal(_segment_bytes(native), _segment_bytes(reference))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_gather_returns_what_was_appended(level: str, dtype: str) -> None:
    layout = SegmentLayout(2, 4, 40, dtype)
    tokens = 3000
    key, value, _ = rows_of(layout, tokens)
    key[0, 0, 5, :4] = torch.tensor([torch.inf, -torch.inf, 6e-8, -0.0])
    attention = DecodeAttention(layout, threads=2, level=level)
    table = table_of(layout, tokens)
    attention.append(key, value, table, 0)
    for start, stop in ((0, tokens), (0, 1), (63, 65), (250, 300), (64, 256), (1000, 2999), (7, 7)):
        for out_dtype in {key.dtype, torch.float32}:
            out = torch.zeros(2, 2, stop - start, 40, dtype=out_dtype)
            attention.gather(table, start, stop, out[0], out[1])
            assert torch.equal(out[0], key[0, :, start:stop].to(out_dtype))
            assert torch.equal(out[1], value[0, :, start:stop].to(out_dtype))


@pytest.mark.parametrize("level", NATIVE)
def test_every_fp16_pattern_is_widened_exactly(level: str) -> None:
    layout = SegmentLayout(1, 1, 256, "float16")
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(1, 1, 256, 256)
    attention = DecodeAttention(layout, level=level)
    table = table_of(layout, 256)
    attention.append(patterns, patterns, table, 0)
    out = torch.empty(2, 1, 256, 256)
    attention.gather(table, 0, 256, out[0], out[1])
    torch.testing.assert_close(out[0], patterns[0].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_outputs_are_rounded_as_pytorch_rounds(level: str, dtype: str) -> None:
    layout = SegmentLayout(1, 1, 8, dtype)
    attention = DecodeAttention(layout, threads=1, level=level)
    table = table_of(layout, 2)
    query = torch.zeros(1, 1, 1, 8, dtype=getattr(torch, dtype))
    bound = 2**14 if dtype == "float16" else 2**62
    values = torch.tensor([1.0, 1e-3, 1e-5, 1e-7, 3.0, 6e-8, float(bound), 1e-30]).to(query.dtype)
    for ulps in range(1, 4):
        other = (values.view(torch.int16) + ulps).view(query.dtype)
        rows = torch.stack([values, other]).view(1, 1, 2, 8)
        attention.append(torch.zeros_like(rows), rows, table, 0)
        expected = ((values.float() + other.float()) / 2).to(query.dtype)
        assert torch.equal(attention.attend(query, table, 2).flatten(), expected)


def _attend_in_child(attention: DecodeAttention, query: Tensor, table: BlockTable, tokens: int) -> None:
    attention.attend(query, table, tokens)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_it_does_not_have() -> None:
    layout = SegmentLayout(3, 9, 64, "float32")
    tokens = 4096
    key, value, query = rows_of(layout, tokens)
    attention = DecodeAttention(layout, threads=3)
    table = table_of(layout, tokens)
    attention.append(key, value, table, 0)
    attention.attend(query, table, tokens)
    child = multiprocessing.get_context("fork").Process(target=_attend_in_child, args=(attention, query, table, tokens))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0


@pytest.mark.parametrize("level", LEVELS)
def test_misuse_is_refused_by_name(level: str) -> None:
    layout = SegmentLayout(2, 4, 16, "float32")
    attention = DecodeAttention(layout, level=level)
    key, value, query = rows_of(layout, 1)
    table = table_of(layout, 256)
    with pytest.raises(ConfigurationError, match=r"query must be .*\(1, 2, 1, 16\)"):
        attention.attend(key, table, 1)
    with pytest.raises(ConfigurationError, match="query must be"):
        attention.attend(query.double(), table, 1)
    with pytest.raises(ConfigurationError, match=r"inside \[0, 256\), got \[0, 257\)"):
        attention.attend(query, table, 257)
    with pytest.raises(ConfigurationError, match=r"got \[256, 257\)"):
        attention.append_and_attend(key, value, query, table, 256)
    with pytest.raises(ConfigurationError, match=r"got \[-1, 0\)"):
        attention.append_and_attend(key, value, query, table, -1)
    with pytest.raises(ConfigurationError, match="key and value must be"):
        attention.append_and_attend(query, value, query, table, 0)
    with pytest.raises(ConfigurationError, match="key and value must be"):
        attention.append(key, value.half(), table, 0)
    with pytest.raises(ConfigurationError, match=r"out_k and out_v must be \(2, 1, 16\)"):
        attention.gather(table, 0, 1, key, value)
    with pytest.raises(ConfigurationError, match="threads must be at least 1, got 0"):
        DecodeAttention(layout, threads=0)
