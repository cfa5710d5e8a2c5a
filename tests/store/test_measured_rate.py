"""What the ledger has measured decides what is refused, and a refusal is not for ever."""

from __future__ import annotations

import pytest
from transfer_parts import StandingClock

from kvstrata.cost.credits import PathRate
from kvstrata.cost.service_rates import Direction, ServiceRates
from kvstrata.store.measured_rate import MeasuredRate
from kvstrata.store.service_ledger import ServiceLedger


def test_the_rate_is_the_ledgers_once_it_rests_on_eight_transfers() -> None:
    ledger, clock = ServiceLedger(), StandingClock()
    rate = MeasuredRate(ledger, "files", Direction.READ, clock)
    for count in range(1, 8):
        rate.note(1000 * count, 0.5 + count)
        assert rate() is None
    rate.note(0, 1.0)
    rate.note(1000, 0.0)
    assert rate() is None
    rate.note(8000, 8.5)
    found = rate()
    assert found is not None
    assert found.setup_s == pytest.approx(0.5)
    assert found.bytes_per_s == pytest.approx(1000.0)
    assert ledger.rates().get("files", Direction.WRITE) is None


def test_it_is_fitted_anew_after_eight_more_and_not_for_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, clock, fits = ServiceLedger(window=8), StandingClock(), list[int]()
    real = ledger.rates

    def rates() -> ServiceRates:
        fits.append(1)
        return real()

    monkeypatch.setattr(ledger, "rates", rates)
    rate = MeasuredRate(ledger, "files", Direction.READ, clock)
    for speed, expected in ((100.0, 100.0), (400.0, 400.0)):
        for _ in range(8):
            rate.note(1000, 1000 / speed)
        assert [rate() for _ in range(20)] == [PathRate(0.0, expected)] * 20
    assert len(fits) == 2


def test_an_old_measurement_refuses_nothing() -> None:
    """Else a path that was slow once would never be tried again."""
    clock = StandingClock()
    rate = MeasuredRate(ServiceLedger(), "files", Direction.READ, clock)
    for _ in range(8):
        rate.note(1000, 100.0)
    clock.now += 60.0
    assert rate() == PathRate(0.0, 10.0)
    clock.now += 1.0
    assert rate() is None
    rate.note(1000, 100.0)
    assert rate() == PathRate(0.0, 10.0)
