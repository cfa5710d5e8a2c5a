from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_parts import Layer, attend, choose_last, support_mask, support_of

from kvstrata.contract.budget import Threshold
from kvstrata.methods.streaming import Streaming


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 6), st.integers(1, 70))
def test_sinks_and_window_fill_the_budget(tokens: int, rows: int, sinks: int, recent: int) -> None:
    layer = Layer.random(tokens)
    ctx = layer.context(rows, sinks=sinks, recent=recent)
    index, selection = choose_last(Streaming(), ctx, layer)
    mask = support_mask(support_of(Streaming(), index, selection, ctx), layer.geometry)
    first, stop = ctx.region
    window = max(tokens - stop, min(rows, tokens) - first)  # persistent rows stay even where they pass the budget
    position = torch.arange(tokens)
    expected = (position < first) | (position >= tokens - window)
    assert torch.equal(mask, expected.expand_as(mask))
    assert ctx.read_bytes == 0


def test_newest_rows_come_first() -> None:
    layer = Layer.random(20)
    _, selection = choose_last(Streaming(), layer.context(9, sinks=2, recent=4), layer)
    assert selection.units.tolist() == [[15, 14, 13]]


def test_a_threshold_is_its_cap() -> None:
    layer = Layer.random(20)
    _, selection = choose_last(Streaming(), layer.context(Threshold(0.0, cap=9), sinks=2, recent=4), layer)
    assert selection.units.tolist() == [[15, 14, 13]]
    assert not selection.capped


def test_budget_of_all_rows_is_exact_attention() -> None:
    layer = Layer.random(30, group=3)
    ctx, step = layer.context(30, sinks=4, recent=8), layer.last_step(2)
    index, selection = choose_last(Streaming(), ctx, layer, 2)
    output = attend(layer, support_of(Streaming(), index, selection, ctx), step)
    torch.testing.assert_close(output.double(), layer.dense_output(step), rtol=1e-4, atol=1e-5)


def test_append_moves_the_frontier() -> None:
    layer = Layer.random(10)
    index = Streaming().build(layer.context(4, visible=7), 0, None)
    index = Streaming().append(layer.context(4), 0, index, layer.step(7, 9))
    assert (index.frontier, index.generation) == (9, 1)
    index = Streaming().truncate(index, 8)
    assert (index.frontier, index.generation) == (8, 2)
