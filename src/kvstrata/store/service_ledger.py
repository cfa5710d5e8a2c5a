"""The store's own ledger of how long transfers took, from which decisions take their rates."""

from __future__ import annotations

import threading
from collections import deque

from kvstrata.cost.bounds import require_finite
from kvstrata.cost.service_rates import Direction, ServiceObservation, ServiceRates, fit_rate

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
        self._fitted: ServiceRates | None = None

    def record(self, observation: ServiceObservation) -> None:
        """Note one completed transfer; O(1)."""
        with self._lock:
            place = (observation.tier, observation.direction)
            samples = self._samples.setdefault(place, deque(maxlen=self._window))
            samples.append((observation.nbytes, observation.seconds))
            self._fitted = None

    def rates(self) -> ServiceRates:
        """Rates of what was noted so far; fitted anew only when something was noted since."""
        with self._lock:
            if self._fitted is None:
                self._fitted = ServiceRates({place: fit_rate(samples) for place, samples in self._samples.items()})
            return self._fitted
