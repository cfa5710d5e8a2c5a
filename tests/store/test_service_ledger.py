"""The ledger gives the rates of its latest observations, also to threads that record at the same time."""

from __future__ import annotations

import threading

import pytest

from kvstrata.cost.service_rates import Direction, ServiceObservation, ServiceRates
from kvstrata.errors import ConfigurationError
from kvstrata.store.service_ledger import ServiceLedger

OBSERVATIONS = [
    ServiceObservation(tier, direction, nbytes * 1000, nbytes / 7)
    for nbytes in range(1, 12)
    for tier in ("files", "host")
    for direction in Direction
]


def test_it_fits_what_a_list_of_the_same_would() -> None:
    ledger = ServiceLedger(window=5)
    assert ledger.rates() == ServiceRates()
    for number, observation in enumerate(OBSERVATIONS):
        ledger.record(observation)
        assert ledger.rates() == ServiceRates.fitted(OBSERVATIONS[: number + 1], window=5)


def test_rates_that_were_taken_do_not_change() -> None:
    ledger = ServiceLedger()
    ledger.record(OBSERVATIONS[0])
    taken = ledger.rates()
    assert ledger.rates() is taken
    ledger.record(OBSERVATIONS[-4])
    rate = taken.get("files", Direction.READ)
    assert rate is not None
    assert rate.observations == 1


def test_threads_lose_no_observation() -> None:
    ledger = ServiceLedger(window=1000)

    def record() -> None:
        for _ in range(100):
            ledger.record(OBSERVATIONS[0])
            ledger.rates()

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = ledger.rates().get("files", Direction.READ)
    assert rate is not None
    assert rate.observations == 400


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="window=0"):
        ServiceLedger(window=0)
