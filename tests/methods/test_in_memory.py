from __future__ import annotations

import pytest
import torch
from selection_parts import Layer

from kvstrata.contract.budget import EstimatedMass, Fraction, Rows, SelectionBudget, Threshold
from kvstrata.errors import Reason, StateError
from kvstrata.methods.in_memory import seeded_generator
from kvstrata.methods.selection import NO_UNIT


@pytest.mark.parametrize(
    ("budget", "sinks", "recent", "region", "allowance"),
    [
        (Rows(20), 4, 10, (4, 90), 6),
        (Rows(14), 4, 10, (4, 90), 0),
        (Rows(5), 4, 10, (4, 90), 0),
        (Rows(200), 4, 10, (4, 90), 86),
        (Fraction(0.5), 4, 10, (4, 90), 36),
        (Threshold(1.0, cap=30), 4, 10, (4, 90), 16),
        (EstimatedMass(0.9, cap=30), 0, 1, (0, 99), 29),
        (Rows(100), 4, 97, (3, 3), 0),
        (Rows(100), 4, 200, (0, 0), 0),
    ],
)
def test_persistent_rows_count_in(
    budget: SelectionBudget, sinks: int, recent: int, region: tuple[int, int], allowance: int
) -> None:
    ctx = Layer.random(100).context(budget, sinks=sinks, recent=recent)
    assert ctx.region == region
    assert ctx.allowance == allowance


def test_rows_are_charged_as_they_are_read() -> None:
    layer = Layer.random(40, kv_heads=3, head_dim=16, dtype=torch.bfloat16)
    ctx = layer.context(8)
    assert torch.equal(ctx.keys(0, 5, 9), layer.k[:, 5:9])
    assert ctx.read_bytes == 4 * 3 * 16 * 2
    assert torch.equal(ctx.values(0, 39, 40), layer.v[:, 39:])
    assert ctx.read_bytes == 5 * 3 * 16 * 2
    assert ctx.keys(0, 7, 7).shape == (3, 0, 16)


def test_keys_of_single_rows() -> None:
    layer = Layer.random(40, kv_heads=2, group=3, head_dim=16)
    ctx = layer.context(8)
    rows = torch.tensor([[3, NO_UNIT, 0], [39, 3, NO_UNIT]])
    keys = ctx.keys_at(0, rows)
    assert torch.equal(keys[0, [0, 2]], layer.k[0, [3, 0]])
    assert torch.equal(keys[1, :2], layer.k[1, [39, 3]])
    assert not bool(keys[rows == NO_UNIT].any())
    assert ctx.read_bytes == 4 * 16 * 4
    each = ctx.keys_at(0, torch.arange(6).unsqueeze(-1))  # one row for each query head
    assert torch.equal(each[:, 0], torch.cat([layer.k[0, :3], layer.k[1, 3:6]]))


@pytest.mark.parametrize("row", [-2, 30, 39, 40])
def test_single_rows_that_are_not_visible_are_refused(row: int) -> None:
    ctx = Layer.random(40).context(8, visible=30)
    with pytest.raises(StateError, match="were asked for; 30 are visible"):
        ctx.keys_at(0, torch.tensor([[0], [row]]))
    assert ctx.read_bytes == 0


@pytest.mark.parametrize(("start", "stop"), [(0, 31), (-1, 4), (5, 4), (30, 41)])
def test_rows_that_are_not_visible_are_refused(start: int, stop: int) -> None:
    ctx = Layer.random(40).context(8, visible=30)
    for read in (ctx.keys, ctx.values):
        with pytest.raises(
            StateError, match=rf"rows \[{start}, {stop}\) were asked for; 30 of 40 are visible"
        ) as refused:
            read(0, start, stop)
        assert refused.value.reason is Reason.NOT_COMMITTED
    assert ctx.read_bytes == 0


def test_a_stream_that_was_not_recorded() -> None:
    with pytest.raises(StateError, match="the residual stream of layer 2 was not recorded"):
        Layer.random(4).context(2).hidden(2)


def test_randomness_depends_on_seed_layer_and_purpose() -> None:
    def draw(seed: int, layer: int, purpose: str) -> list[int]:
        return torch.randint(0, 2**31, (4,), generator=seeded_generator(seed, layer, purpose)).tolist()

    drawn = [draw(0, 0, "a"), draw(1, 0, "a"), draw(0, 1, "a"), draw(0, 0, "b"), draw(0, 0, "")]
    assert len({tuple(one) for one in drawn}) == 5
    assert draw(0, 0, "a") == drawn[0]
    ctx = Layer.random(4).context(2, seed=1)
    assert torch.randint(0, 2**31, (4,), generator=ctx.generator(0, "a")).tolist() == drawn[1]
