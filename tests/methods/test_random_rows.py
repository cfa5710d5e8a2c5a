from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_parts import Layer, attend, choose_last, support_of

from kvstrata.errors import ConfigurationError
from kvstrata.methods.random_rows import RandomRows


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 6), st.integers(1, 20), st.integers(0, 99))
def test_as_many_different_rows_of_the_region_as_the_budget_has(
    tokens: int, rows: int, sinks: int, recent: int, seed: int
) -> None:
    layer = Layer.random(tokens)
    ctx = layer.context(rows, sinks=sinks, recent=recent)
    first, stop = ctx.region
    _, selection = choose_last(RandomRows(seed), ctx, layer)
    assert selection.units.shape == (2, min(ctx.allowance, stop - first))
    for units in selection.units.tolist():
        assert len(set(units)) == len(units)
        assert all(first <= unit < stop for unit in units)
    assert ctx.read_bytes == 0


def test_draws_depend_on_seeds_and_step_alone() -> None:
    layer = Layer.random(200)

    def drawn(seed: int, frame_seed: int, visible: int) -> list[list[int]]:
        ctx = layer.context(20, visible=visible, seed=frame_seed)
        method = RandomRows(seed)
        step = layer.step(visible - 1, visible)
        return method.select(ctx, 0, method.build(ctx, 0, None), step).units.tolist()

    assert drawn(1, 0, 200) == drawn(1, 0, 200)
    others = [drawn(2, 0, 200), drawn(1, 1, 200), drawn(1, 0, 199)]
    assert all(other != drawn(1, 0, 200) for other in others)
    first, second = drawn(1, 0, 200)
    assert first != second


def test_a_smaller_budget_takes_a_prefix() -> None:
    layer = Layer.random(100)
    _, large = choose_last(RandomRows(), layer.context(40), layer)
    _, small = choose_last(RandomRows(), layer.context(11), layer)
    assert torch.equal(small.units, large.units[:, :10])


def test_rows_are_drawn_uniformly() -> None:
    """4000 draws of 5 of 20 rows: each row 1000 times, with a standard deviation of 27."""
    layer = Layer.random(21)
    counts = torch.zeros(20)
    for seed in range(2000):
        _, selection = choose_last(RandomRows(seed), layer.context(6), layer)
        counts += torch.bincount(selection.units.flatten(), minlength=20)
    assert counts.sum() == 20_000
    assert bool(((counts - 1000).abs() < 5 * 27.4).all())


def test_budget_of_all_rows_is_exact_attention() -> None:
    layer = Layer.random(30, group=3)
    ctx, step = layer.context(30), layer.last_step()
    index, selection = choose_last(RandomRows(), ctx, layer)
    output = attend(layer, support_of(RandomRows(), index, selection, ctx), step)
    torch.testing.assert_close(output.double(), layer.dense_output(step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "1"])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(ConfigurationError, match=r"RandomRows\.seed must be a whole number of at least 0"):
        RandomRows(seed)  # type: ignore[arg-type]
