"""The store's own ledger of how long transfers took, from which decisions take their rates."""

from __future__ import annotations

import threading
from collections import deque

from kvstrata.cost.bounds import require_finite
from kvstrata.cost.service_rates import Direction, ServiceObservation, ServiceRate, ServiceRates, fit_rate

__all__ = ["ServiceLedger"]


class ServiceLedger:
    """The latest `window` transfers of each tier and direction. Safe for several threads.

    Errors: `ConfigurationError` unless `window` is positive.
    """

    def __init__(self, window: int = 64) -> None:
        require_finite("window", window, least=1)
        self._window = window
        self._lock = threading.Lock()
        self._samples: dict[tuple[str, Direction], deque[tuple[int, float]]] = {}
        self._fitted: dict[tuple[str, Direction], ServiceRate] = {}
        self._rates = ServiceRates()

    def record(self, observation: ServiceObservation) -> None:
        """Note one completed transfer; O(1)."""
        place = (observation.tier, observation.direction)
        with self._lock:
            samples = self._samples.setdefault(place, deque(maxlen=self._window))
            samples.append((observation.nbytes, observation.seconds))
            self._fitted.pop(place, None)

    def rates(self) -> ServiceRates:
        """Rates of what was noted so far. Fits anew where something was noted since: about a millisecond for each tier
        and direction at a window of 64, quadratic in the window.
        """
        with self._lock:
            stale = self._samples.keys() - self._fitted.keys()
            if stale:
                self._fitted.update({place: fit_rate(self._samples[place]) for place in stale})
                self._rates = ServiceRates(self._fitted)
            return self._rates
