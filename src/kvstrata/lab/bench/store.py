"""The store's core: look-ups, put and get of every tier, promotion, and what coalescing saves."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvstrata.lab.bench.result import BenchReport, environment
from kvstrata.lab.bench.store_chunks import SHAPES
from kvstrata.lab.bench.store_coalescing import bench_coalescing
from kvstrata.lab.bench.store_files import bench_files
from kvstrata.lab.bench.store_lookup import bench_lookups
from kvstrata.lab.bench.store_memory import bench_memory_tiers
from kvstrata.lab.bench.store_promotion import bench_promotion

__all__ = ["bench_store"]

_PROMOTION_ROUNDS = 15


def bench_store(
    rounds: int = 15,
    seed: int = 0,
    quick: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Ratios are of interleaved rounds in this process; look-ups run in a fresh process for each catalog.

    rounds: of put, get and coalescing; promotions are repeated 15 times as often. quick: few rounds of small sizes, to
    see that it runs; its figures say nothing. The temporary store lies where `tempfile` puts it, and wants 3 GB.
    """
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    if quick:
        rounds = min(rounds, 3)
        rows = bench_lookups([200, 1000], rounds, seed, progress, tokens=16, asked=1000)
        rows += bench_memory_tiers(SHAPES[:1], rounds, seed, progress, sample_bytes=1 << 20)
        rows += bench_files(SHAPES[:1], rounds, seed, progress)
        rows += bench_promotion(rounds, seed, progress)
    else:
        rows = bench_lookups([10_000, 1_000_000], rounds, seed, progress)
        rows += bench_memory_tiers(SHAPES, rounds, seed, progress)
        rows += bench_files(SHAPES, rounds, seed, progress)
        rows += bench_promotion(_PROMOTION_ROUNDS * rounds, seed, progress)
    rows += bench_coalescing(rounds, seed, progress)
    settings = environment(1, seed=seed, rounds=rounds, quick=quick)
    return BenchReport("store", {**settings, "load_average_1min": load}, tuple(rows))
