"""Rates are found in what was measured, stalls do not move them far, and too little says nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cost.service_rates import Direction, ServiceObservation, ServiceRate, ServiceRates, fit_rate
from kvstrata.errors import ConfigurationError

MIB = 2**20


@given(
    st.lists(st.integers(1, 10**8), min_size=2, max_size=20, unique=True),
    st.floats(1e6, 1e10),
    st.floats(1e-4, 1.0),
)
def test_an_exact_line_is_found(sizes: list[int], bytes_per_s: float, fixed_s: float) -> None:
    rate = fit_rate([(nbytes, fixed_s + nbytes / bytes_per_s) for nbytes in sizes])
    assert rate.observations == len(sizes)
    for nbytes in sizes:
        assert rate.seconds(nbytes) == pytest.approx(fixed_s + nbytes / bytes_per_s, rel=1e-6)


def test_worked_line() -> None:
    rate = fit_rate([(nbytes * MIB, 0.002 + nbytes / 100) for nbytes in (1, 2, 4, 8, 16)])
    assert rate.bytes_per_s == pytest.approx(100 * MIB)
    assert rate.fixed_s == pytest.approx(0.002)
    assert rate.seconds(50 * MIB, transfers=5) == pytest.approx(0.51)


def test_a_quarter_of_stalls_is_no_rate() -> None:
    """A mean or a least-squares line would be ten times slower."""
    quiet = [(nbytes * MIB, 0.002 + nbytes / 100) for nbytes in range(1, 16)]
    stalled = [(nbytes * MIB, 5.0) for nbytes in (3, 6, 9, 12, 15)]
    rate = fit_rate(quiet + stalled)
    assert rate.seconds(8 * MIB) == pytest.approx(0.082, rel=0.25)


def test_one_size_says_nothing_about_the_fixed_part() -> None:
    rate = fit_rate([(MIB, 0.01), (MIB, 0.02), (MIB, 0.9)])
    assert (rate.fixed_s, rate.bytes_per_s) == (0.0, MIB / 0.02)
    assert rate.seconds(MIB) == pytest.approx(0.02)


@pytest.mark.parametrize(
    "samples",
    [
        [(MIB, 0.02), (2 * MIB, 0.01)],  # larger and quicker: no positive slope
        [(MIB, 0.001), (2 * MIB, 0.1)],  # a line that starts below zero
    ],
)
def test_a_line_that_cannot_be_is_not_used(samples: list[tuple[int, float]]) -> None:
    rate = fit_rate(samples)
    ratios = [nbytes / seconds for nbytes, seconds in samples]
    assert (rate.fixed_s, rate.bytes_per_s) == (0.0, sum(ratios) / 2)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 100)), min_size=1, max_size=12))
def test_any_observations_give_times_that_can_be(samples: list[tuple[int, float]]) -> None:
    rate = fit_rate(samples)
    assert rate == fit_rate(samples)
    assert math.isfinite(rate.bytes_per_s)
    assert rate.bytes_per_s > 0
    assert rate.fixed_s >= 0
    assert rate.seconds(1) <= rate.seconds(10**9)


def observe(tier: str, direction: Direction, *seconds: float) -> list[ServiceObservation]:
    return [ServiceObservation(tier, direction, MIB, one) for one in seconds]


def test_tiers_and_directions_are_kept_apart() -> None:
    rates = ServiceRates.fitted(
        observe("files", Direction.READ, 0.1, 0.1)
        + observe("files", Direction.WRITE, 0.5)
        + observe("host", Direction.READ, 0.01)
    )
    assert rates.get("files", Direction.READ) == ServiceRate(MIB / 0.1, 0.0, 2)
    assert rates.get("files", Direction.WRITE) == ServiceRate(MIB / 0.5, 0.0, 1)
    assert rates.get("host", Direction.READ) == ServiceRate(MIB / 0.01, 0.0, 1)
    assert rates.get("host", Direction.WRITE) is None


def test_a_rate_on_too_few_observations_is_none() -> None:
    rates = ServiceRates.fitted(observe("files", Direction.READ, 0.1, 0.1))
    assert rates.get("files", Direction.READ, least_observations=2) is not None
    assert rates.get("files", Direction.READ, least_observations=3) is None


def test_only_the_latest_observations_count() -> None:
    slow_then_quick = observe("files", Direction.READ, 9.0, 9.0, 9.0, 0.1, 0.1)
    rate = ServiceRates.fitted(slow_then_quick, window=2).get("files", Direction.READ)
    assert rate == ServiceRate(MIB / 0.1, 0.0, 2)


@pytest.mark.parametrize(
    ("field", "value"), [("nbytes", 0), ("nbytes", -1), ("seconds", 0.0), ("seconds", math.nan), ("seconds", math.inf)]
)
def test_an_observation_that_cannot_be_is_refused(field: str, value: float) -> None:
    sound: dict[str, Any] = {"tier": "files", "direction": Direction.READ, "nbytes": 1, "seconds": 1.0}
    with pytest.raises(ConfigurationError, match=rf"ServiceObservation\.{field}={value} "):
        ServiceObservation(**{**sound, field: value})


@pytest.mark.parametrize(("field", "value"), [("bytes_per_s", 0.0), ("fixed_s", -1.0), ("observations", -1)])
def test_a_rate_that_cannot_be_is_refused(field: str, value: float) -> None:
    sound: dict[str, Any] = {"bytes_per_s": 1.0, "fixed_s": 0.0, "observations": 1}
    with pytest.raises(ConfigurationError, match=rf"ServiceRate\.{field}={value} "):
        ServiceRate(**{**sound, field: value})


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="window=0"):
        ServiceRates.fitted([], window=0)
