"""Bits and tables for an expected number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.errors import ConfigurationError
from kvstrata.methods.hash_tables import ProjectorScope
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.interface import Geometry, StepRows
from kvstrata.methods.magicpig import MagicPIG
from kvstrata.methods.magicpig_tuning import expected_rows, tuned_to
from kvstrata.methods.selection import NO_UNIT
from kvstrata.methods.simhash import cosines, inclusion_probability


def layer(seed: int, rows: int = 400, queries: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, rows, 16, generator=generator) + 2
    return keys, torch.randn(6, queries, 16, generator=generator)


def test_the_expectation_is_the_sum_of_the_inclusion_probabilities() -> None:
    method, samples = MagicPIG(bits=6, tables=30), [layer(0), layer(1, queries=9)]
    sums = [
        inclusion_probability(cosines(queries.view(2, -1, 16), keys - keys.mean(1, keepdim=True)), 6, 30).sum(-1)
        for keys, queries in samples
    ]
    assert expected_rows(method, samples) == pytest.approx(torch.cat([s.flatten() for s in sums]).mean().item(), 1e-4)


@pytest.mark.parametrize("rows", [1.5, 20, 60, 188, 300])
def test_the_expected_rows_are_those_asked_for(rows: float) -> None:
    tuning = tuned_to(MagicPIG(), [layer(0), layer(1)], rows)
    assert tuning.rows == pytest.approx(rows, rel=0.03)
    assert tuning.rows == expected_rows(tuning.method, [layer(0), layer(1)])
    assert tuning.method.tables <= 150
    # One bit more would not reach it with as many tables.
    more = MagicPIG(bits=tuning.method.bits + 1, tables=150)
    assert expected_rows(more, [layer(0), layer(1)]) < rows


def test_samples_have_the_expected_size() -> None:
    """Over 400 draws of the planes, within 4.5 standard errors."""
    keys, queries = layer(3, rows=200, queries=1)
    method = tuned_to(MagicPIG(projectors=ProjectorScope.KV_HEAD_AND_LAYER), [(keys, queries)], 32, 60).method
    draws = 400
    geometry = Geometry(1, 6 * draws, 2 * draws, 16, 0.25, (None,))
    # One static row, the step's own, beside the region.
    rows = torch.cat((keys, torch.zeros(2, 1, 16)), dim=1).repeat(draws, 1, 1)
    ctx = InMemoryContext(geometry, {0: (rows, rows)}, Rows(201), Persistent(0, 1), 201)
    index = method.build(ctx, 0, None)
    step = StepRows(200, queries.repeat(draws, 1, 1), rows[:, -1:], rows[:, -1:])
    sizes = (method.select(ctx, 0, index, step).units != NO_UNIT).sum(-1).double().view(draws, 6).mean(-1)
    assert abs(sizes.mean().item() - expected_rows(method, [(keys, queries)])) < 4.5 * sizes.std().item() / draws**0.5


def test_other_settings_stay() -> None:
    method = MagicPIG(projectors=ProjectorScope.KV_HEAD_AND_LAYER, dense_layers=(1,))
    tuned = tuned_to(method, [layer(0)], 40).method
    assert (tuned.projectors, tuned.dense_layers) == (method.projectors, method.dense_layers)


def test_what_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"150 tables sample 400\.0 rows on average, not 500"):
        tuned_to(MagicPIG(), [layer(0)], 500)
    with pytest.raises(ConfigurationError, match="rows=0 must be above 0"):
        tuned_to(MagicPIG(), [layer(0)], 0)
    with pytest.raises(ConfigurationError, match="most_tables=1 at least 2"):
        tuned_to(MagicPIG(), [layer(0)], 5, 1)
    with pytest.raises(ConfigurationError, match="samples holds no query"):
        expected_rows(MagicPIG(), [])
