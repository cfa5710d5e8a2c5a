"""Rows of the store's benchmark that say how fast bytes move, as a share of what moves them without a store."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kvstrata.lab.bench.result import BenchRow, median_interval

__all__ = ["GOAL", "rate_row"]

GOAL = 0.85
"""Share of a plain copy or a plain file that put and get are to reach."""


def rate_row(
    name: str, nbytes: int, seconds: Sequence[float], plain: Sequence[float], *, goal: bool = True
) -> BenchRow:
    """`seconds` and `plain` are of the same rounds, each for `nbytes`; the ratio is of the rates, 1 when equal."""
    ratio = median_interval([theirs / ours for ours, theirs in zip(seconds, plain, strict=True)])
    return BenchRow(
        name,
        nbytes / statistics.median(seconds) / 2**20,
        "MiB/s",
        nbytes / statistics.median(plain) / 2**20,
        ratio.median,
        f">= {GOAL}" if goal else "",
        ratio.median >= GOAL if goal else None,
        ratio.n,
        ratio.low,
        ratio.high,
    )
