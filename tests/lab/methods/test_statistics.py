"""Intervals of means and ratios."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.lab.methods.statistics import mean_interval, ratio_interval


def test_a_mean_lies_between_its_bounds() -> None:
    samples = np.random.default_rng(1).normal(3.0, 1.0, 100)
    found = mean_interval(samples)
    assert found.median == pytest.approx(samples.mean())
    assert found.low < found.median < found.high
    assert found.high - found.low == pytest.approx(4 * 1.0 / 10, rel=0.2)
    assert found == mean_interval(samples)
    assert mean_interval([2.0, 2.0]).low == mean_interval([2.0, 2.0]).high == 2.0


def test_a_ratio_is_taken_of_the_same_steps() -> None:
    base = np.array([1.0, 100.0, 10.0, 50.0])
    found = ratio_interval(3 * base, base)
    assert (found.median, found.low, found.high, found.n) == pytest.approx((3.0, 3.0, 3.0, 4))
    assert ratio_interval([1.0], [0.0]).median == np.inf
    assert ratio_interval([0.0], [0.0]).median == 1.0


@pytest.mark.parametrize(("samples", "baseline"), [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]])])
def test_what_cannot_be_compared_is_refused(samples: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        ratio_interval(samples, baseline)
