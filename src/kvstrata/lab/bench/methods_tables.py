"""The figures of `bench methods` as rows with goals and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.lab.bench.result import BenchRow, BenchTable
from kvstrata.lab.methods.contenders import BASELINE, FLOOR
from kvstrata.lab.methods.divergence import Divergence
from kvstrata.lab.methods.measuring import Measured
from kvstrata.lab.methods.statistics import mean_interval, ratio_interval

__all__ = ["GOAL_ROWS", "cost_table", "divergence_table", "goal_rows", "support_table"]

GOAL_ROWS = 256
_QUEST, _MOST_RATIO = "quest.16", 3.1
_BETTER_THAN_FLOOR = ("magicpig", "infinigen", "infllm", "infllm.in_place")


def goal_rows(measured: Sequence[Measured]) -> Iterator[BenchRow]:
    """Omitted mass of every contender as a ratio to the baseline's at the same rows, and to sinks and window where that
    is a goal. A figure whose counterpart was not measured has no ratio."""
    found = {(each.contender.name, each.contender.rows): each for each in measured}
    for (name, rows), each in found.items():
        base = found.get((BASELINE, rows))
        if base is not None:
            goal = f"<= {_MOST_RATIO}" if (name, rows) == (_QUEST, GOAL_ROWS) else ""
            yield _against(f"methods.{name}.{rows}.omitted_mass", each, base, goal, _at_most)
    for name in _BETTER_THAN_FLOOR:
        reader, floor = found.get((name, GOAL_ROWS)), found.get((FLOOR, GOAL_ROWS))
        if reader is not None and floor is not None:
            goal = "< 1 at the upper 95 % bound"
            yield _against(f"methods.{name}.{GOAL_ROWS}.omitted_mass.to_{FLOOR}", reader, floor, goal, _below_one)


def support_table(measured: Sequence[Measured]) -> BenchTable:
    """What was left out, and what that did to the output."""
    lines = []
    for each in measured:
        mass = mean_interval(each.by_step("omitted"))
        lines.append(
            (
                each.contender.name,
                float(each.contender.rows),
                mass.median,
                mass.low,
                mass.high,
                each.mean("recall"),
                each.mean("error"),
                each.mean("relative_error"),
                each.mean("dense_norm"),
                each.mean("support_error"),
                each.mean("bound"),
                each.mean("entered"),
                each.mean("head_rows"),
            )
        )
    columns = "omitted mass|low|high|support recall|output error|relative|dense norm|support's error|its bound"
    return BenchTable(
        "What is left out (means over layers, heads and steps; bounds over steps)",
        ("method", "rows", *columns.split("|"), "rows entered", "rows read per K/V head"),
        tuple(lines),
    )


def cost_table(measured: Sequence[Measured], dense: NDArray[np.float64]) -> BenchTable:
    """What choosing cost: medians over layers and steps, bytes as means. dense: seconds of attention over all rows."""
    lines: list[tuple[str | float | None, ...]] = []
    for each in measured:
        chosen = each.mean("chosen_bytes")
        lines.append(
            (
                each.contender.name,
                float(each.contender.rows),
                float(np.median(each.index_bytes)),
                float(np.median(each.build)) * 1e3,
                *(each.median(stage) * 1e3 for stage in ("append", "select", "gather", "attend")),
                each.mean("read_bytes") / 1024,
                each.mean("page_bytes") / chosen if chosen else None,
            )
        )
    lines.append(("dense, same reference", None, 0.0, 0.0, 0.0, 0.0, 0.0, float(np.median(dense)) * 1e3, None, None))
    columns = "build ms|append ms|select ms|gather ms|attend ms|read KiB|read amplification"
    return BenchTable(
        "What choosing costs, per layer and step",
        ("method", "rows", "index bytes per token and K/V head", *columns.split("|")),
        tuple(lines),
    )


def divergence_table(diverged: Sequence[tuple[str, int, Divergence]]) -> BenchTable:
    """How far the next token's distribution moved in live requests."""
    lines = []
    for name, rows, each in diverged:
        mean = mean_interval(each.kl)
        lines.append(
            (
                name,
                float(rows),
                mean.median,
                mean.low,
                mean.high,
                float(np.median(each.kl)),
                float(np.percentile(each.kl, 95)),
                float(each.agrees.mean()),
                float((each.surprise - each.dense_surprise).mean()),
                float(each.chose.mean()),
            )
        )
    columns = "mean KL, nats|low|high|median|p95|same best token|extra surprise, nats|share of layers that chose"
    return BenchTable("Divergence from exact, teacher-forced", ("method", "rows", *columns.split("|")), tuple(lines))


def _against(name: str, each: Measured, other: Measured, goal: str, met: Callable[[float, float], bool]) -> BenchRow:
    ratio = ratio_interval(each.by_step("omitted"), other.by_step("omitted"))
    return BenchRow(
        name,
        each.mean("omitted"),
        "of the mass",
        other.mean("omitted"),
        ratio.median,
        goal,
        met(ratio.median, ratio.high) if goal else None,
        ratio.n,
        ratio.low,
        ratio.high,
    )


def _at_most(ratio: float, high: float) -> bool:
    return ratio <= _MOST_RATIO


def _below_one(ratio: float, high: float) -> bool:
    return high < 1
