"""Many seeds, in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.lab.soak.simulator import SeedResult, run_seed

__all__ = ["STEPS_OF_A_SEED", "run_soak"]

STEPS_OF_A_SEED = 5000
"""A seed's process lives that long, then everything is closed and counted."""


def run_soak(
    steps: int, seed: int = 0, processes: int = 1, progress: Callable[[int], None] = lambda steps: None
) -> list[SeedResult]:
    """Run at least `steps` steps with the seeds from `seed` on. progress(steps done): after every seed.

    Stops at the first broken invariant. Blocks. Errors: `ConfigurationError` for numbers below 1, or a negative seed.
    """
    for name, value, least in (("steps", steps, 1), ("processes", processes, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{name}={value} must be at least {least}")
    jobs = [(seed + n, min(STEPS_OF_A_SEED, steps - start)) for n, start in enumerate(range(0, steps, STEPS_OF_A_SEED))]
    results: list[SeedResult] = []
    for result in _results(jobs, processes):
        results.append(result)
        progress(sum(each.steps for each in results))
        if result.failure is not None:
            break
    return sorted(results, key=lambda each: each.seed)


def _results(jobs: list[tuple[int, int]], processes: int) -> Iterator[SeedResult]:
    if processes == 1 or len(jobs) == 1:
        yield from (run_seed(*job) for job in jobs)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_run, jobs)


def _run(job: tuple[int, int]) -> SeedResult:
    return run_seed(*job)
