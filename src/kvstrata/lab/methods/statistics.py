"""Means over steps with percentile-bootstrap bounds: steps are resampled, not heads or layers, which hang together."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvstrata.lab.bench.result import Interval

__all__ = ["mean_interval", "ratio_interval"]

_ROUNDS = 2000


def mean_interval(samples: ArrayLike, *, seed: int = 0) -> Interval:
    """The mean with its 95 % bounds. `Interval.median` holds the mean. Errors: `ValueError` for no samples."""
    return ratio_interval(samples, np.ones_like(np.asarray(samples, dtype=np.float64)), seed=seed)


def ratio_interval(samples: ArrayLike, baseline: ArrayLike, *, seed: int = 0) -> Interval:
    """The ratio of both means with 95 % bounds, where sample i of either is of the same step.

    Infinite where the baseline is zero and the samples are not; 1 where both are. Errors: `ValueError` for no samples,
    or not as many of either.
    """
    above, below = np.asarray(samples, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if above.ndim != 1 or above.shape != below.shape or not above.size:
        raise ValueError(f"{above.shape} samples and {below.shape} of the baseline cannot be compared")
    drawn = np.random.default_rng(seed).integers(0, above.size, (_ROUNDS, above.size))
    ratios = np.array([_ratio(*pair) for pair in zip(above[drawn].mean(1), below[drawn].mean(1), strict=True)])
    low, high = np.percentile(ratios, [2.5, 97.5], method="nearest")
    return Interval(_ratio(above.mean(), below.mean()), float(low), float(high), above.size)


def _ratio(above: float, below: float) -> float:
    if below == 0:
        return 1.0 if above == 0 else float("inf")
    return float(above / below)
