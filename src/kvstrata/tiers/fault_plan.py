"""Which call fails, and how: decided by a seed and by the number of the call, so that a failure can be repeated."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvstrata.errors import ConfigurationError, Reason

__all__ = ["Fault", "FaultInjector", "FaultPlan", "Injection", "Killed"]


class Fault(StrEnum):
    """What happens instead.

    DELAY: the call takes longer. SHORTEN: fewer bytes arrive than were asked for. CORRUPT: one bit is another. LOSE: a
    write is acknowledged and gone, a read finds nothing. DUPLICATE: it happens twice. REORDER: it happens after the
    next one. HANG: it does not return until `FaultInjector.let_go`. FILL_UP: no space. DIE: the process ends here.
    """

    DELAY = "delay"
    SHORTEN = "shorten"
    CORRUPT = "corrupt"
    LOSE = "lose"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    HANG = "hang"
    FILL_UP = "fill_up"
    DIE = "die"


class Killed(BaseException):
    """The process ended here, as far as the test is concerned: no handler may undo anything after it."""


@dataclass(frozen=True, slots=True)
class Injection:
    """`fault` at the n-th `call` (from 0) of `operation`. As a plan's entry it is a wish, in the log a fact."""

    operation: str
    call: int
    fault: Fault


@dataclass(frozen=True)
class FaultPlan:
    """explicit: faults at chosen calls. rates: probability of each fault at every other call, from `seed`. operations:
    where rates apply; empty means everywhere. delay_s: how long DELAY takes.

    Errors: `ConfigurationError` for rates outside 0 to 1, or that sum to more than 1.
    """

    seed: int = 0
    rates: Mapping[Fault, float] = field(default_factory=dict)
    explicit: tuple[Injection, ...] = ()
    operations: frozenset[str] = frozenset()
    delay_s: float = 0.001

    def __post_init__(self) -> None:
        if any(not 0 <= rate <= 1 for rate in self.rates.values()) or sum(self.rates.values()) > 1:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"rates={dict(self.rates)} must be probabilities that sum to at most 1"
            )

    def fault(self, operation: str, call: int) -> Fault | None:
        """What happens at this call. Depends on nothing else: threads may interleave calls of other operations."""
        for wish in self.explicit:
            if (wish.operation, wish.call) == (operation, call):
                return wish.fault
        if not self.rates or (self.operations and operation not in self.operations):
            return None
        drawn = random.Random(f"{self.seed}/{operation}/{call}").random()  # noqa: S311 - repeatable, not secret
        for fault, rate in self.rates.items():
            if drawn < rate:
                return fault
            drawn -= rate
        return None


class FaultInjector:
    """Counts calls, consults the plan, keeps the log. One may be shared by several wrappers. Thread-safe.

    sleep: for DELAY. die: what DIE does; by default it raises `Killed`, `lambda: os._exit(137)` ends the process. After
    `Killed` every further call raises it too, until `revive`. supports: a wrapper names the faults that mean something
    for a call; others are passed over and not logged.
    """

    def __init__(
        self,
        plan: FaultPlan,
        *,
        sleep: Callable[[float], None] = time.sleep,
        die: Callable[[], None] | None = None,
    ) -> None:
        self.plan = plan
        self.log: list[Injection] = []
        self.enabled = True
        self._calls: dict[str, int] = {}
        self._sleep = sleep
        self._die = die
        self._dead = False
        self._released = threading.Event()
        self._lock = threading.Lock()

    @property
    def dead(self) -> bool:
        """Whether DIE has struck, and nothing has revived it."""
        return self._dead

    @property
    def calls(self) -> dict[str, int]:
        """Calls of every operation so far, faulty or not, while enabled."""
        with self._lock:
            return dict(self._calls)

    def next(self, operation: str, supports: frozenset[Fault]) -> Fault | None:
        """Count one call and say what is to happen to it. DELAY, HANG and DIE have happened when this returns.

        Errors: `Killed`.
        """
        if self._dead:
            raise Killed
        if not self.enabled:
            return None
        with self._lock:
            call = self._calls.get(operation, 0)
            self._calls[operation] = call + 1
            fault = self.plan.fault(operation, call)
            if fault is None or fault not in supports:
                return None
            self.log.append(Injection(operation, call, fault))
        if fault is Fault.DELAY:
            self._sleep(self.plan.delay_s)
        elif fault is Fault.HANG:
            self._released.wait()
        elif fault is Fault.DIE:
            if self._die is not None:
                self._die()
            self._dead = True
            raise Killed
        else:
            return fault
        return None

    def let_go(self) -> None:
        """End every HANG, those to come included."""
        self._released.set()

    def revive(self) -> None:
        """The process was started again."""
        self._dead = False
