"""Look-ups of the catalog, each in a fresh process, so that memory is that of the entries and of nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.errors import KvstrataError, Reason
from kvstrata.lab.bench.result import BenchRow, median_interval

__all__ = ["bench_lookups"]

_GOAL = 200_000
_ENTRY_GOAL = 500


def bench_lookups(
    sizes: Sequence[int],
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
    tokens: int = 256,
    asked: int = 100_000,
) -> list[BenchRow]:
    """For every number of chunks: the rate when all are remembered, the rate of the first look-up of each, which asks
    SQLite, and resident bytes for each entry, token ids apart.

    Entries are made up. Look-ups compare context, tenant, generation and token ids, on one thread, at random. Goals:
    200,000 a second, 500 bytes, at the largest size.
    """
    rows: list[BenchRow] = []
    for chunks in sizes:
        progress(f"look-ups at {chunks} chunks")
        rows += _rows(chunks, _fresh_process(chunks, tokens, asked, rounds, seed), goal=chunks == max(sizes))
    return rows


def _fresh_process(*settings: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvstrata.lab.bench.store_lookup_child", *map(str, settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KvstrataError(Reason.INVALID_ARGUMENT, f"the measuring process failed:\n{done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _rows(chunks: int, got: dict[str, Any], *, goal: bool) -> list[BenchRow]:
    name = f"lookup.{chunks}"
    share = median_interval([rate / _GOAL for rate in got["rates"]])
    rate, entry = share.median * _GOAL, got["entry_bytes"]
    rows = [
        BenchRow(f"{name}.entries", chunks, "chunks", evidence="synthetic"),
        BenchRow(
            f"{name}.remembered",
            rate,
            "1/s",
            _GOAL,
            share.median,
            f">= {_GOAL} a second" if goal else "",
            rate >= _GOAL if goal else None,
            share.n,
            share.low,
            share.high,
        ),
        BenchRow(f"{name}.cold", got["cold_rate"], "1/s", n=got["cold_n"]),
    ]
    if entry is not None:
        met = entry <= _ENTRY_GOAL if goal else None
        words = f"<= {_ENTRY_GOAL}, token ids apart" if goal else ""
        rows.append(BenchRow(f"{name}.entry", entry, "bytes", _ENTRY_GOAL, entry / _ENTRY_GOAL, words, met))
    return rows
