"""Bounds hold as often as they say."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.budget import Rows
from kvstrata.contract.identity import CacheAbi, ChunkContext, ModelIdentity, PositionRule
from kvstrata.contract.method import Owner
from kvstrata.cost.prepublication import EstimateSource
from kvstrata.errors import ConfigurationError
from kvstrata.methods.calibrating import CalibrationSample, calibrate
from kvstrata.methods.calibration import Calibration, budget_key
from kvstrata.methods.quest import Quest
from kvstrata.methods.random_rows import RandomRows
from kvstrata.methods.selection import Selection

BUDGET = budget_key(Rows(128))


CONTEXT = ChunkContext(
    ModelIdentity("id:m", ("a@1",)), CacheAbi(2, 2, 1, 8, "float32"), PositionRule("default", 1e4), chunk_tokens=64
)


SHARES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=80)


def _samples(pairs: list[tuple[float, float]], layer: int = 0) -> list[CalibrationSample]:
    return [CalibrationSample(raw, omitted, BUDGET, layer) for raw, omitted in pairs]


def _made(pairs: list[tuple[float, float]], **settings: Any) -> Calibration:
    return calibrate(Quest(), CONTEXT, _samples(pairs), **settings)


def test_worked_quantile() -> None:
    """Nine samples at confidence 0.9: the ninth smallest, (9 + 1) * 0.9. With eight there is none: the bound is 1."""
    pairs = [(0.1, place / 100) for place in range(1, 10)]
    assert _made(pairs, bins=1).estimate(0.1, BUDGET, 0).omitted == 0.09
    assert _made(pairs[:8], bins=1).estimate(0.1, BUDGET, 0).omitted == 1.0


def test_bins_follow_the_raw_estimate() -> None:
    made = _made([(raw, raw / 2) for raw in (place / 100 for place in range(100))], bins=4)
    (curve,) = made.curves
    assert curve.upper == (0.24, 0.49, 0.74, 0.99)
    assert curve.samples == 100
    # 24th of the 25 samples in each bin: ceil(26 * 0.9).
    assert curve.bounds == (0.115, 0.24, 0.365, 0.49)
    assert [curve.bound(raw) for raw in (0.0, 0.24, 0.25, 0.9)] == [0.115, 0.115, 0.24, 0.49]
    assert made.estimate(0.3, BUDGET, 0).confidence == 0.9


def test_few_samples_share_a_bin() -> None:
    made = _made([(raw / 20, 0.1) for raw in range(20)], bins=8)
    assert len(made.curves[0].upper) == 2


@pytest.mark.parametrize("confidence", [0.8, 0.9])
def test_the_stated_share_of_new_selections_is_covered(confidence: float) -> None:
    """Raw estimates that are too low by a random factor: 200 artefacts of 60 samples, 20 new selections for each."""
    rng = random.Random(17)

    def draw() -> tuple[float, float]:
        omitted = rng.random() ** 2
        return omitted * rng.random(), omitted

    covered = drawn = 0
    for _ in range(200):
        made = _made([draw() for _ in range(60)], confidence=confidence, bins=4)
        for raw, omitted in (draw() for _ in range(20)):
            covered += made.estimate(raw, BUDGET, 0).omitted >= omitted
            drawn += 1
    assert covered / drawn >= confidence - 0.03


@given(SHARES, st.integers(1, 6), st.floats(0.5, 0.99))
def test_bounds_do_not_fall_and_lie_in_their_range(
    pairs: list[tuple[float, float]], bins: int, confidence: float
) -> None:
    (curve,) = _made(pairs, bins=bins, confidence=confidence).curves
    assert all(low <= high for low, high in pairwise(curve.bounds))
    assert all(0 <= bound <= 1 for bound in curve.bounds)
    assert all(low < high for low, high in pairwise(curve.upper))
    assert curve.upper[-1] == max(raw for raw, _ in pairs)
    raws = sorted(raw for raw, _ in pairs)
    assert all(curve.bound(low) <= curve.bound(high) for low, high in pairwise(raws))


def test_a_method_without_an_opinion_gets_one_bound() -> None:
    samples = [CalibrationSample(None, place / 100, BUDGET, 0) for place in range(40)]
    made = calibrate(RandomRows(), CONTEXT, samples)
    found = made.estimate(None, BUDGET, 0)
    assert (found.raw, found.source) == (None, EstimateSource.CALIBRATION)
    assert found.omitted == 0.36  # the 37th of 40, ceil(41 * 0.9)


def test_layers_have_curves_of_their_own_beside_the_common_one() -> None:
    samples = _samples([(0.1, 0.05)] * 20, layer=0) + _samples([(0.1, 0.5)] * 20, layer=1)
    made = calibrate(Quest(), CONTEXT, samples, per_layer=True)
    assert [made.estimate(0.1, BUDGET, layer).omitted for layer in (0, 1, 2)] == [0.05, 0.5, 0.5]
    assert {curve.layer for curve in made.curves} == {None, 0, 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"confidence": 1.0}, "confidence"), ({"confidence": math.nan}, "confidence"), ({"bins": 0}, "bins")],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{message} must be"):
        _made([(0.1, 0.1)], **settings)


def test_without_samples_there_is_no_artefact() -> None:
    with pytest.raises(ConfigurationError, match="samples must be at least one"):
        calibrate(Quest(), CONTEXT, [])


def test_a_sample_of_a_selection_takes_the_worst_head() -> None:
    units, omitted = torch.zeros(1, 0, dtype=torch.int64), torch.tensor([[0.2], [0.4]], dtype=torch.float64)
    selection = Selection(Owner.KV_HEAD, units, 3, estimate=torch.tensor([0.25, 0.125]))
    assert CalibrationSample.of(selection, omitted, Rows(128), 2) == CalibrationSample(0.25, 0.4, BUDGET, 2)
    silent = CalibrationSample.of(replace(selection, estimate=None), omitted, Rows(128), 2)
    assert silent.raw is None


@pytest.mark.parametrize(("raw", "omitted"), [(1.1, 0.0), (-0.1, 0.0), (0.1, math.nan), (None, 2.0)])
def test_samples_are_shares(raw: float | None, omitted: float) -> None:
    with pytest.raises(ConfigurationError, match="CalibrationSample"):
        CalibrationSample(raw, omitted, BUDGET, 0)
