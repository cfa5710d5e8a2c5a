"""A seeded simulator that drives the store's own parts, step by step, against plain records of what must be."""

from __future__ import annotations

from kvstrata.lab.soak.simulator import Failure, SeedResult, run_seed

__all__ = ["Failure", "SeedResult", "run_seed"]
