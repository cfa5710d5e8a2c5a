"""A seeded simulator that drives the store's own parts, step by step, against plain records of what must be.

No threads, no waiting, no PyTorch: time passes when the simulator says so, and a seed repeats everything.
"""

from __future__ import annotations

from kvstrata.lab.soak.run import STEPS_OF_A_SEED, run_soak
from kvstrata.lab.soak.simulator import Failure, SeedResult, run_seed

__all__ = ["STEPS_OF_A_SEED", "Failure", "SeedResult", "run_seed", "run_soak"]
