"""What every benchmark reports: one row a figure, with its baseline, its goal and how sure it is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstrata.lab.machine import describe_machine

__all__ = ["BenchReport", "BenchRow", "BenchTable", "Interval", "environment", "interleaved", "median_interval"]

MEASURED = "measured"


@dataclass(frozen=True)
class Interval:
    """A median and the 95 % bounds of it."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class BenchRow:
    """One figure.

    value, baseline: medians in `unit`. ratio: what the goal speaks of. goal: in words, e.g. `>= 1.6`, or empty where
    there is none. met: whether it is reached, `None` without a goal. n: sample size. low, high: 95 % bounds of the
    ratio. evidence: printed as `class`: measured, synthetic, documented or reported.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None
    n: int = 1
    low: float | None = None
    high: float | None = None
    evidence: str = MEASURED

    def to_json(self) -> dict[str, Any]:
        """Plain values under the published names."""
        data = asdict(self)
        data["class"] = data.pop("evidence")
        return data


@dataclass(frozen=True)
class BenchTable:
    """Many figures of the same kind. columns: of every line, with their units; a cell is text, a number, or `None`."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str | float | None, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values: the title, and one object for each line."""
        return {"title": self.title, "lines": [dict(zip(self.columns, line, strict=True)) for line in self.lines]}


@dataclass(frozen=True)
class BenchReport:
    """All rows of one benchmark and the machine they were taken on. tables: what stands beside the rows."""

    bench: str
    environment: dict[str, Any]
    rows: tuple[BenchRow, ...]
    tables: tuple[BenchTable, ...] = ()

    @property
    def met(self) -> bool:
        """Whether no row misses its goal."""
        return all(row.met is not False for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values under the published names."""
        return {
            "bench": self.bench,
            "environment": self.environment,
            "rows": [row.to_json() for row in self.rows],
            **({"tables": [table.to_json() for table in self.tables]} if self.tables else {}),
        }


def median_interval(samples: Sequence[float], *, seed: int = 0, rounds: int = 2000) -> Interval:
    """Median with percentile-bootstrap bounds at 95 %. Errors: `ValueError` for no samples."""
    if not samples:
        raise ValueError("an interval needs at least one sample")
    rng = random.Random(seed)  # noqa: S311 - resampling, not secrecy
    medians = sorted(statistics.median(rng.choices(samples, k=len(samples))) for _ in range(rounds))
    return Interval(
        statistics.median(samples), medians[int(0.025 * rounds)], medians[int(0.975 * rounds) - 1], len(samples)
    )


def environment(threads: int, **more: object) -> dict[str, Any]:
    """The machine, the versions and the settings a figure depends on."""
    from kvstrata.kernels.native import describe

    return {**describe_machine(), "threads": threads, "kernels": asdict(describe()), **more}


def interleaved(samplers: dict[str, Callable[[], float]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Call every sampler once a round, in turn, so that drift of the machine hits all of them alike."""
    for _ in range(warm_up):
        for sample in samplers.values():
            sample()
    results: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            results[name].append(sample())
    return results
