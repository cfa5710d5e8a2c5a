"""The rate of one path as measured lately, for refusing what would be late."""

from __future__ import annotations

import threading

from kvstrata.cost.credits import PathRate
from kvstrata.cost.service_rates import Direction, ServiceObservation
from kvstrata.ports import Clock
from kvstrata.store.service_ledger import ServiceLedger

__all__ = ["MeasuredRate"]

_LEAST = 8
"""Observations before anything is refused, and between two fits."""
_WINDOW = 16
_TRUSTED_S = 60.0


class MeasuredRate:
    """Notes transfers of `tier` in `ledger`, and tells how fast the latest sixteen were. Thread-safe; does not block.

    There is no rate, and so no refusal, before eight transfers were noted. When none was for a minute, all are
    forgotten: what is refused is not measured, and a path that has become fast again must not stay refused.
    """

    def __init__(self, ledger: ServiceLedger, tier: str, direction: Direction, clock: Clock) -> None:
        self._ledger = ledger
        self._tier = tier
        self._direction = direction
        self._clock = clock
        self._lock = threading.Lock()
        self._recent = ServiceLedger(_WINDOW)
        self._rate: PathRate | None = None
        self._noted = 0
        self._latest = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """One transfer has ended; one of no bytes or no time says nothing."""
        if nbytes > 0 and seconds > 0:
            observation = ServiceObservation(self._tier, self._direction, nbytes, seconds)
            self._ledger.record(observation)
            with self._lock:
                self._recent.record(observation)
                self._noted += 1
                self._latest = self._clock()

    def __call__(self) -> PathRate | None:
        """The rate in force."""
        with self._lock:
            if self._clock() - self._latest > _TRUSTED_S:
                self._recent, self._noted, self._rate = ServiceLedger(_WINDOW), 0, None
            elif self._noted >= _LEAST:
                self._noted = 0
                found = self._recent.rates().get(self._tier, self._direction, _LEAST)
                self._rate = None if found is None else PathRate(found.fixed_s, found.bytes_per_s)
            return self._rate
