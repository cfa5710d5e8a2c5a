from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_parts import Layer, attend, choose_last, support_mask, support_of

from kvstrata.contract.budget import EstimatedMass, Threshold
from kvstrata.contract.method import GroupSharing, Owner
from kvstrata.errors import ConfigurationError
from kvstrata.methods.exact_top_k import ExactTopK
from kvstrata.methods.selection import NO_UNIT

layers = st.builds(
    Layer.random,
    tokens=st.integers(1, 60),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([1, 5, 16]),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
methods = st.builds(ExactTopK, st.sampled_from([GroupSharing.SEPARATE, GroupSharing.SOFTMAX_SUM, GroupSharing.MAX]))


@given(layers, st.integers(1, 70), st.integers(0, 4), st.integers(1, 9))
def test_each_query_head_keeps_its_heaviest_rows(layer: Layer, rows: int, sinks: int, recent: int) -> None:
    ctx = layer.context(rows, sinks=sinks, recent=recent)
    first, stop = ctx.region
    _, selection = choose_last(ExactTopK(), ctx, layer)
    weights = layer.dense(layer.last_step())[:, 0, first:stop]
    count = min(ctx.allowance, stop - first)
    assert selection.owner is Owner.QUERY_HEAD
    assert selection.units.shape == (layer.geometry.query_heads, count)
    chosen = weights.gather(-1, selection.units - first)
    best = weights.sort(-1, descending=True).values[:, :count]
    torch.testing.assert_close(chosen, best, rtol=1e-4, atol=1e-7)


@given(layers, st.integers(2, 70))
def test_one_list_for_a_group_leaves_out_the_least_mass(layer: Layer, rows: int) -> None:
    _, selection = choose_last(ExactTopK(GroupSharing.SOFTMAX_SUM), layer.context(rows), layer)
    weights = layer.dense(layer.last_step())[:, 0, : layer.tokens - 1]
    mass = weights.view(layer.geometry.kv_heads, layer.geometry.group, -1).sum(1)
    best = mass.sort(-1, descending=True).values[:, : rows - 1]
    torch.testing.assert_close(mass.gather(-1, selection.units), best, rtol=1e-4, atol=1e-7)


def test_rules_of_a_group_differ() -> None:
    """Row 0 has the highest score in one head, row 1 the largest sum of weights."""
    k = torch.tensor([[[40.0, 0.0], [39.9, 40.0], [0.0, 0.0]]])
    q = torch.zeros(2, 3, 2)
    q[0, -1], q[1, -1] = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0])
    layer = Layer(q, k, torch.zeros_like(k))
    for sharing, expected in (
        (GroupSharing.MAX, [[0]]),
        (GroupSharing.SOFTMAX_SUM, [[1]]),
        (GroupSharing.SEPARATE, [[0], [1]]),
    ):
        _, selection = choose_last(ExactTopK(sharing), layer.context(2), layer)
        assert selection.units.tolist() == expected


@given(layers, methods, st.integers(1, 70), st.integers(0, 4), st.integers(1, 9))
def test_estimate_is_the_omitted_mass(layer: Layer, method: ExactTopK, rows: int, sinks: int, recent: int) -> None:
    ctx = layer.context(rows, sinks=sinks, recent=recent)
    index, selection = choose_last(method, ctx, layer)
    kept = support_mask(support_of(method, index, selection, ctx), layer.geometry)
    omitted = layer.dense(layer.last_step())[:, 0].masked_fill(kept, 0.0).sum(-1)
    assert selection.estimate is not None
    torch.testing.assert_close(selection.estimate.double(), omitted, rtol=1e-4, atol=2e-6)


@given(layers, methods, st.integers(1, 3))
def test_budget_of_all_rows_is_exact_attention(layer: Layer, method: ExactTopK, rows: int) -> None:
    rows = min(rows, layer.tokens)
    step, ctx = layer.last_step(rows), layer.context(layer.tokens)
    index, selection = choose_last(method, ctx, layer, rows)
    support = support_of(method, index, selection, ctx)
    assert bool(support_mask(support, layer.geometry).all())
    torch.testing.assert_close(attend(layer, support, step).double(), layer.dense_output(step), rtol=1e-4, atol=1e-5)


def test_rows_far_below_the_best_are_still_chosen() -> None:
    """Their weights underflow; a budget with room for them takes them, the better first."""
    k = torch.tensor([[[-900.0], [0.0], [-300.0], [0.0]]])
    layer = Layer(torch.ones(2, 4, 1), k, k)
    for sharing in (GroupSharing.SEPARATE, GroupSharing.SOFTMAX_SUM, GroupSharing.MAX):
        _, selection = choose_last(ExactTopK(sharing), layer.context(4), layer)
        assert selection.units[0].tolist() == [1, 2, 0]


def test_ties_go_to_the_lower_row() -> None:
    layer = Layer(torch.ones(2, 9, 4), torch.ones(1, 9, 4), torch.ones(1, 9, 4))
    _, selection = choose_last(ExactTopK(), layer.context(4, sinks=1), layer)
    assert selection.units.tolist() == [[1, 2], [1, 2]]


def test_threshold_and_mass_are_about_true_weights() -> None:
    k = torch.tensor([[[4.0], [3.0], [1.0], [-90.0]]])
    layer = Layer(torch.ones(1, 4, 1), k, k)
    _, near = choose_last(ExactTopK(), layer.context(Threshold(1.5, cap=4)), layer)
    assert near.units.tolist() == [[0, 1]]
    share = float(torch.softmax(k[0, :3, 0], 0)[0])
    for mass, units in ((share - 0.01, [0]), (share + 0.01, [0, 1])):
        _, heavy = choose_last(ExactTopK(), layer.context(EstimatedMass(mass, cap=4)), layer)
        assert heavy.units.tolist() == [units]
    _, capped = choose_last(ExactTopK(), layer.context(EstimatedMass(1.0, cap=2)), layer)
    assert capped.units.tolist() == [[0]]
    assert capped.capped


def test_a_step_of_several_rows_is_causal() -> None:
    """The second row of the step would be best for the first, which does not see it."""
    k = torch.tensor([[[0.0], [1.0], [0.5], [50.0], [0.0]]])
    q = torch.zeros(1, 5, 1)
    q[0, 2] = 5.0
    layer = Layer(q, k, k)
    ctx = layer.context(2)
    method = ExactTopK(GroupSharing.MAX)
    selection = method.select(ctx, 0, method.build(ctx, 0, None), layer.step(2, 5))
    assert selection.units.tolist() == [[1]]


def test_keys_before_the_step_are_charged_once() -> None:
    layer = Layer.random(20_000, kv_heads=1, group=1, head_dim=2, dtype=torch.bfloat16)
    ctx = layer.context(64)
    index, _ = choose_last(ExactTopK(), ctx, layer)
    assert ctx.read_bytes == 19_999 * 2 * 2
    assert index.nbytes == 0


def test_append_moves_the_frontier() -> None:
    layer = Layer.random(10)
    method = ExactTopK()
    index = method.append(layer.context(4), 0, method.build(layer.context(4, visible=7), 0, None), layer.step(7, 10))
    assert (index.frontier, index.generation) == (10, 1)


def test_empty_region() -> None:
    layer = Layer.random(5)
    for sharing in (GroupSharing.SEPARATE, GroupSharing.SOFTMAX_SUM, GroupSharing.MAX):
        _, selection = choose_last(ExactTopK(sharing), layer.context(8, recent=5), layer)
        assert selection.units.shape[1] == 0
        assert not bool((selection.units == NO_UNIT).any())


def test_other_sharings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"ExactTopK\.sharing must be one of .* got <GroupSharing\.SUM"):
        ExactTopK(GroupSharing.SUM)
