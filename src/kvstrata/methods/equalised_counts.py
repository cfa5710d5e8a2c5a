"""How many rows each head reads, when all heads are to read equally many: from scores to counts, to one count.

Lee et al. 2024, "InfiniGen", section 4.3: heads work in parallel, so that the longest list would hold up all; each gets
the mean of how many rows pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

__all__ = ["Comparison", "CountRule", "ThresholdBest", "equalise", "mass_counts", "threshold_counts"]


class Comparison(StrEnum):
    """AT_LEAST: a score of best - alpha passes. ABOVE: it does not, as in the authors' offloading code."""

    AT_LEAST = "at_least"
    ABOVE = "above"


class CountRule(StrEnum):
    """The one count that the owners' counts become. MEAN: their mean, rounded up. TRUNCATED_MEAN: rounded down, as in
    the authors' code, which also averages over the sequences of a batch; here every sequence is alone."""

    MEAN = "mean"
    TRUNCATED_MEAN = "truncated_mean"


class ThresholdBest(StrEnum):
    """The best score that alpha is below. OWN: of each head. FIRST_HEAD: of the first one, for all, as in the authors'
    accuracy scripts: heads with lower scores pass less, down to nothing."""

    OWN = "own"
    FIRST_HEAD = "first_head"


def threshold_counts(
    scores: Tensor,
    allowed: Tensor,
    alpha: float,
    comparison: Comparison = Comparison.AT_LEAST,
    best: ThresholdBest = ThresholdBest.OWN,
) -> Tensor:
    """Rows int64 [owners] that pass, of `scores` [owners, rows]. The best score is that of any row, also where
    `allowed` (bool, same shape) excludes it."""
    bar = (scores if best is ThresholdBest.OWN else scores[:1]).amax(-1, keepdim=True) - alpha
    passes = scores >= bar if comparison is Comparison.AT_LEAST else scores > bar
    return (passes & allowed).sum(-1)


def mass_counts(scores: Tensor, shared: Tensor, allowed: Tensor, offered: Tensor, mass: float) -> Tensor:
    """Rows int64 [owners] that each owner needs, best first, to reach `mass` of the estimated attention mass.

    scores: [query_heads, rows], scaled. shared: [owners, rows], which are best. allowed: bool [owners, rows]. offered:
    bool [rows]; the others enter anyway and count in. The heads of an owner share by the mean of their masses.
    """
    share: Tensor = torch.softmax(scores.double(), dim=-1)
    share = share.reshape(shared.shape[0], -1, share.shape[-1]).mean(1)
    order = torch.sort(shared.masked_fill(~allowed, -torch.inf), dim=-1, descending=True, stable=True).indices
    ordered = share.gather(-1, order)
    before = ordered.cumsum(-1) - ordered + (share * ~offered).sum(-1, keepdim=True)
    wanted = allowed.gather(-1, order)
    return (wanted if mass >= 1 else wanted & (before < mass)).sum(-1)


def equalise(counts: Sequence[int], rule: CountRule) -> int:
    """One count for all owners."""
    mean = sum(counts) / len(counts)
    return math.ceil(mean) if rule is CountRule.MEAN else int(mean)
