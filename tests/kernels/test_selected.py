from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.errors import ConfigurationError
from kvstrata.kernels.selected import selected_state, selected_weights
from kvstrata.kernels.state import PartialState


def _inputs(
    owners: int, group: int, rows: int, count: int, dim: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((owners * group, rows), (owners, count), (owners, count))
    query, keys, values = (torch.randn(*shape, dim, generator=generator).to(dtype) for shape in shapes)
    return query, keys, values


def _reference(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, seen: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and weights in float64; `seen` [query_heads, rows, n]. Rows that see nothing give zeros."""
    group = query.shape[0] // keys.shape[0]
    scores = query.double() @ keys.double().repeat_interleave(group, 0).mT * scale
    if bias is not None:
        scores = scores + bias.double().unsqueeze(1)
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1).masked_fill(~seen, 0.0)
    values = values.double().repeat_interleave(group, 0)
    return weights @ values, weights


@given(
    owners=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4]),
    rows=st.integers(1, 3),
    count=st.integers(1, 20),
    dim=st.sampled_from([1, 5, 16]),
    mask=st.sampled_from(["none", "entries", "rows"]),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_state_and_weights_are_softmax_attention(
    owners: int,
    group: int,
    rows: int,
    count: int,
    dim: int,
    mask: str,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    query, keys, values = _inputs(owners, group, rows, count, dim, seed, dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    shape = {"none": (1, 1, count), "entries": (owners, 1, count), "rows": (owners, rows, count)}[mask]
    visible = torch.rand(shape, generator=generator) < (2 if mask == "none" else 0.6)
    bias = torch.randn(owners * group, count, generator=generator) * 3 if biased else None
    given_mask = {"none": None, "entries": visible[:, 0], "rows": visible}[mask]
    seen = visible.expand(owners, rows, count).repeat_interleave(group, 0)
    output, weights = _reference(query, keys, values, 0.3, seen, bias)
    state = selected_state(query, keys, values, 0.3, given_mask, bias)
    torch.testing.assert_close(state.output().double(), output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        selected_weights(query, keys, state, 0.3, given_mask, bias).double(), weights, rtol=1e-5, atol=1e-6
    )


def test_parts_merge_to_the_whole() -> None:
    query, keys, values = _inputs(2, 3, 2, 40, 16, seed=3)
    whole = selected_state(query, keys, values, 0.25)
    parts = [selected_state(query, keys[:, part], values[:, part], 0.25) for part in (slice(0, 7), slice(7, 40))]
    merged = parts[0].merge(parts[1])
    torch.testing.assert_close(merged.output(), whole.output(), rtol=1e-5, atol=1e-6)
    # Weights of a part under the merged state are those of the whole.
    weights = torch.cat(
        [selected_weights(query, keys[:, part], merged, 0.25) for part in (slice(0, 7), slice(7, 40))], -1
    )
    torch.testing.assert_close(weights, selected_weights(query, keys, whole, 0.25), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6, 2), rtol=1e-5, atol=0)


def test_no_rows_are_the_neutral_element() -> None:
    query, keys, values = _inputs(2, 3, 2, 0, 16, seed=0)
    state = selected_state(query, keys, values, 0.25)
    assert state.u.shape == (6, 2, 16)
    assert bool((state.m == -math.inf).all())
    assert not bool(state.output().any())
    assert selected_weights(query, keys, state, 0.25).shape == (6, 2, 0)


def test_heads_that_see_nothing_are_the_neutral_element() -> None:
    query, keys, values = _inputs(2, 2, 1, 5, 8, seed=1)
    visible = torch.tensor([[False] * 5, [True] * 5])
    state = selected_state(query, keys, values, 0.25, visible)
    empty = PartialState.empty(2, 1, head_dim=8)
    assert torch.equal(state.m[:2], empty.m)
    assert torch.equal(state.l[:2], empty.l)
    assert torch.equal(state.u[:2], empty.u)
    alone = selected_state(query[2:], keys[1:], values[1:], 0.25)
    torch.testing.assert_close(state.output()[2:], alone.output(), rtol=1e-6, atol=1e-6)
    assert not bool(selected_weights(query, keys, state, 0.25, visible)[:2].any())


@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
def test_what_is_not_seen_may_hold_anything(filler: float) -> None:
    """Memory that was never written, behind entries that are no rows."""
    query, keys, values = _inputs(2, 2, 2, 6, 8, seed=2)
    visible = torch.tensor([[True, False, True, True, False, False]] * 2)
    clean = selected_state(query, keys[:, [0, 2, 3]], values[:, [0, 2, 3]], 0.25)
    keys[:, [1, 4, 5]] = filler
    values[:, [1, 4, 5]] = filler
    for mask in (visible, visible.unsqueeze(1), visible[:1], visible.unsqueeze(1).expand(2, 2, 6)):
        state = selected_state(query, keys, values, 0.25, mask)
        torch.testing.assert_close(state.output(), clean.output(), rtol=1e-6, atol=1e-6)
        weights = selected_weights(query, keys, state, 0.25, mask)
        assert not bool(weights[:, :, [1, 4, 5]].any())
        assert not bool(weights.isnan().any())


def test_rows_of_a_step_see_different_entries() -> None:
    query, keys, values = _inputs(1, 1, 3, 3, 4, seed=4)
    causal = torch.ones(3, 3, dtype=torch.bool).tril().unsqueeze(0)
    output = selected_state(query, keys, values, 0.5, causal).output()
    torch.testing.assert_close(output[0, 0], values[0, 0])
    alone = selected_state(query[:, 1:2], keys[:, :2], values[:, :2], 0.5).output()
    torch.testing.assert_close(output[:, 1:2], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e4, 1e18, -1e18])
def test_huge_scores_neither_overflow_nor_vanish(size: float) -> None:
    query, keys, values = (
        torch.ones(2, 1, 1),
        torch.tensor([[[size], [size], [0.0]]]),
        torch.tensor([[[1.0], [3.0], [9.0]]]),
    )
    state = selected_state(query, keys, values, 1.0)
    expected = 2.0 if size > 0 else 9.0
    assert state.output().flatten().tolist() == [expected] * 2
    weights = selected_weights(query, keys, state, 1.0)
    assert weights[0, 0].tolist() == ([0.5, 0.5, 0.0] if size > 0 else [0.0, 0.0, 1.0])


def test_a_bias_of_minus_infinity_leaves_a_row_out() -> None:
    query, keys, values = _inputs(1, 2, 1, 4, 8, seed=5)
    bias = torch.zeros(2, 4)
    bias[0, 1:] = -math.inf
    bias[1] = -math.inf
    state = selected_state(query, keys, values, 0.25, log_bias=bias)
    torch.testing.assert_close(state.output()[0, 0], values[0, 0])
    assert not bool(state.output()[1].any())
    assert selected_weights(query, keys, state, 0.25, log_bias=bias).sum(-1).flatten().tolist() == [1.0, 0.0]


def test_a_bias_multiplies_the_weight() -> None:
    query, keys, values = torch.zeros(1, 1, 2), torch.zeros(1, 2, 2), torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])
    state = selected_state(query, keys, values, 1.0, log_bias=torch.tensor([[0.0, math.log(3.0)]]))
    torch.testing.assert_close(state.output(), torch.full((1, 1, 2), 0.75))


def test_inputs_need_not_lie_together() -> None:
    query, keys, values = _inputs(2, 3, 4, 10, 8, seed=6)
    spread = query.transpose(0, 1).contiguous().transpose(0, 1)
    bias = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)).T
    assert not spread.is_contiguous()
    assert not bias.is_contiguous()
    one = selected_state(query, keys, values, 0.25, log_bias=bias.contiguous())
    other = selected_state(spread, keys.mT.contiguous().mT, values, 0.25, log_bias=bias)
    torch.testing.assert_close(other.output(), one.output(), rtol=1e-6, atol=1e-6)


def test_heads_must_divide() -> None:
    query, keys, values = _inputs(3, 1, 1, 4, 8, seed=7)
    with pytest.raises(ConfigurationError, match="3 query heads do not divide over 2 owners"):
        selected_state(query, keys[:2], values[:2], 0.25)
