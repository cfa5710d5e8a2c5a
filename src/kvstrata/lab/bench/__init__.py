"""Benchmarks that print ratios, each against a baseline taken in the same run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.lab.bench.result import BenchReport, BenchRow

__all__ = ["BENCHES", "BenchReport", "BenchRow", "run_bench"]

BENCHES = {
    "decode": "kvstrata.lab.bench.decode:bench_decode",
    "prefill": "kvstrata.lab.bench.prefill:bench_prefill",
    "restore": "kvstrata.lab.bench.restore:bench_restore",
    "compile": "kvstrata.lab.bench.compiled:bench_compile",
    "memory": "kvstrata.lab.bench.memory:bench_memory",
    "store": "kvstrata.lab.bench.store:bench_store",
    "methods": "kvstrata.lab.bench.methods:bench_methods",
    "needles": "kvstrata.lab.bench.needles:bench_needles",
    "break-even": "kvstrata.lab.bench.break_even:bench_break_even",
}
"""Name of each benchmark and where it lives; loaded when it is run."""


def run_bench(name: str, *, progress: Callable[[str], None] = lambda text: None, **settings: object) -> BenchReport:
    """Run one benchmark. Errors: `ConfigurationError` for a name that is not in `BENCHES`."""
    if name not in BENCHES:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"bench {name!r} does not exist", f"one of: {', '.join(BENCHES)}, all"
        )
    module, _, function = BENCHES[name].partition(":")
    report: BenchReport = getattr(import_module(module), function)(progress=progress, **settings)
    return report
