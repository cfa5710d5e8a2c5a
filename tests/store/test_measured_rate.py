"""What the ledger has measured decides what is refused, and a refusal is not for ever."""

from __future__ import annotations

import pytest
from transfer_parts import StandingClock

from kvstrata.cost.credits import PathRate
from kvstrata.cost.service_rates import Direction
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


def test_it_is_fitted_anew_after_eight_more_from_the_latest_sixteen() -> None:
    ledger, clock = ServiceLedger(), StandingClock()
    rate = MeasuredRate(ledger, "files", Direction.READ, clock)
    for speed, expected in ((100.0, 100.0), (400.0, 250.0), (400.0, 400.0)):
        for count in range(8):
            before = rate()
            rate.note(1000, 1000 / speed)
            assert rate() is before or count == 7
        assert rate() == PathRate(0.0, expected)
    everything = ledger.rates().get("files", Direction.READ)
    assert everything is not None
    assert everything.observations == 24


def test_what_others_noted_in_the_ledger_refuses_nothing() -> None:
    """It may be of another time, or of another memory."""
    ledger, clock = ServiceLedger(), StandingClock()
    theirs, ours = (MeasuredRate(ledger, "files", Direction.READ, clock) for _ in range(2))
    for _ in range(64):
        theirs.note(1000, 100.0)
    for _ in range(8):
        ours.note(1000, 1.0)
    assert (theirs(), ours()) == (PathRate(0.0, 10.0), PathRate(0.0, 1000.0))


def test_an_old_measurement_refuses_nothing() -> None:
    """Else a path that was slow once would never be tried again."""
    clock = StandingClock()
    rate = MeasuredRate(ServiceLedger(), "files", Direction.READ, clock)
    for _ in range(16):
        rate.note(1000, 100.0)
    clock.now += 60.0
    assert rate() == PathRate(0.0, 10.0)
    clock.now += 1.0
    assert rate() is None
    for _ in range(7):
        rate.note(1000, 1.0)
        assert rate() is None
    rate.note(1000, 1.0)
    assert rate() == PathRate(0.0, 1000.0)
