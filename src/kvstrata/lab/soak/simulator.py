"""One seed: an action at random after the other, and what must hold after each."""

from __future__ import annotations

import bisect
import itertools
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from kvstrata.lab.soak import endings, histories, interrupts, readers, replicas, transfers
from kvstrata.lab.soak.invariants import Invariants
from kvstrata.lab.soak.reference import BrokenInvariantError
from kvstrata.lab.soak.world import World
from kvstrata.tiers.fault_plan import Killed

__all__ = ["ACTIONS", "Failure", "SeedResult", "run_seed"]

ACTIONS = {
    **histories.ACTIONS,
    **replicas.ACTIONS,
    **readers.ACTIONS,
    **transfers.ACTIONS,
    **endings.ACTIONS,
    **interrupts.ACTIONS,
}
"""Name -> action and its weight."""

_ALONE = frozenset({"write", "copy", "interrupt", "reclaim", "kill"})
_BETWEEN = 0.04
_THOROUGH = 20
_RECENT = 12


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken invariant. seed, step: what reproduces it. recent: the latest actions, the failing one last. where: the
    innermost calls.
    """

    seed: int
    step: int
    what: str
    recent: tuple[str, ...]
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What one seed did. steps: done. counts: of outcomes and faults. trace: digest of all outcomes in order."""

    seed: int
    steps: int
    counts: Counter[str]
    trace: str
    failure: Failure | None = None


def run_seed(seed: int, steps: int) -> SeedResult:
    """Run `steps` steps and close everything. Deterministic: the same arguments give the same result."""
    return _Simulator(seed).run(steps)


class _Simulator:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = World(seed)
        self.world.meanwhile = self._meanwhile
        self.invariants = Invariants(self.world)
        self._names = list(ACTIONS)
        self._ends = list(itertools.accumulate(weight for _, weight in ACTIONS.values()))
        self._inside = False
        self._broken: BrokenInvariantError | None = None
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._trace = xxh3_128()

    def run(self, steps: int) -> SeedResult:
        world, step, failure = self.world, 0, None
        try:
            for step in range(steps):
                self._step(step)
            endings.quiesce(world)
            self.invariants.thorough()
            endings.close(world)
        except Exception as error:  # noqa: BLE001 - whatever the store raises that no action expects is a finding
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            where = tuple(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
            what = str(error) if isinstance(error, BrokenInvariantError) else f"{type(error).__name__}: {error}"
            failure = Failure(self.seed, step, what, tuple(self._recent), where)
        counts = world.counts + Counter(f"fault.{each.operation}.{each.fault}" for each in world.injector.log)
        return SeedResult(self.seed, step + 1, counts, self._trace.hexdigest(), failure)

    def _step(self, step: int) -> None:
        world, name = self.world, self._draw()
        world.raced = False
        world.clock.advance(0.001)
        try:
            self._act(name)
        except Killed:
            world.dead = True
        if self._broken is not None:
            raise self._broken
        if world.dead:
            endings.reboot(world)
            self.invariants.forget()
        if step % _THOROUGH:
            self.invariants.quick()
        else:
            self.invariants.thorough()

    def _act(self, name: str) -> None:
        self._recent.append(f"{name}: ...")
        outcome = ACTIONS[name][0](self.world)
        self._recent.append(f"{name}: {outcome}")
        self._trace.update(f"{name} {outcome} {self.world.clock.now!r}\n".encode())
        self.world.count(f"{name}.{outcome}")

    def _draw(self) -> str:
        return self._names[bisect.bisect_right(self._ends, self.world.rng.random() * self._ends[-1])]

    def _meanwhile(self) -> None:
        """What another thread does while this one copies."""
        if self._inside or self.world.rng.random() >= _BETWEEN:
            return
        name = self._draw()
        if name in _ALONE:
            return
        self._inside = self.world.raced = True
        try:
            self._act(name)
        except Exception as error:
            # Whoever copies may take an error of another thread for one of its own.
            self._broken = error if isinstance(error, BrokenInvariantError) else BrokenInvariantError(repr(error))
            raise
        finally:
            self._inside = False
