"""The store's own speed: look-ups, puts and gets of each tier, promotions, and what sharing a read saves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from kvstrata.lab.bench.result import BenchReport, environment
from kvstrata.lab.bench.store_lookups import lookup_rows
from kvstrata.lab.bench.store_promotions import promotion_rows
from kvstrata.lab.bench.store_tiers import tier_rows

__all__ = ["bench_store"]

_SIZES = (64 << 10, 1 << 20, 8 << 20)


def bench_store(
    chunks: int = 1_000_000,
    rounds: int = 15,
    sizes: tuple[int, ...] = _SIZES,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    **_: object,
) -> BenchReport:
    """Measure in a temporary directory. chunks: entries of the catalog, made up. sizes: payload bytes of a chunk."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        root = Path(folder)
        progress(f"look-ups among {chunks} chunks")
        rows = lookup_rows(root / "catalog", chunks, seed)
        for size in sizes:
            progress(f"puts and gets of {size} bytes")
            rows += tier_rows(root / f"tiers-{size}", size, rounds)
        progress("promotions")
        rows += promotion_rows(root / "promotions", 4 * rounds)
    return BenchReport("store", environment(1, seed=seed), tuple(rows))
