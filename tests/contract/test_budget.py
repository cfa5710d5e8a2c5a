from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.budget import CapFallback, EstimatedMass, Fraction, Persistent, Rows, SelectionBudget, Threshold
from kvstrata.errors import ConfigurationError, Reason

budgets = st.one_of(
    st.builds(Rows, st.integers(1, 300)),
    st.builds(Fraction, st.floats(0, 1, exclude_min=True), st.integers(1, 20)),
    st.builds(Threshold, st.floats(0, 9), st.integers(1, 300)),
    st.builds(EstimatedMass, st.floats(0, 1, exclude_min=True), st.integers(1, 300)),
)


@given(budgets, st.integers(0, 200), st.integers(0, 200))
def test_limit_never_passes_what_is_visible_and_never_shrinks(budget: SelectionBudget, one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert 0 <= budget.limit(few) <= few
    assert budget.limit(few) <= budget.limit(many)
    assert few == 0 or budget.limit(few) >= 1


@pytest.mark.parametrize(
    ("budget", "visible", "rows"),
    [
        (Rows(512), 4096, 512),
        (Rows(512), 100, 100),
        (Fraction(0.1), 4096, 409),
        (Fraction(0.29), 100, 29),  # 28.999999999999996 in floating point
        (Fraction(0.1), 70, 7),  # 7.000000000000001
        (Fraction(1.0), 77, 77),
        (Fraction(1), 77, 77),
        (Fraction(0.5), 3, 1),
        (Fraction(0.001), 100, 1),
        (Fraction(0.001, least=16), 100, 16),
        (Fraction(0.001, least=16), 9, 9),
        (Threshold(5.0, cap=64), 1000, 64),
        (EstimatedMass(0.95, cap=64), 10, 10),
    ],
)
def test_limits(budget: SelectionBudget, visible: int, rows: int) -> None:
    assert budget.limit(visible) == rows


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 300))
def test_sinks_and_recent_rows_never_cross(sinks: int, recent: int, visible: int) -> None:
    first, stop = Persistent(sinks, recent).bounds(visible)
    assert 0 <= first <= stop <= visible
    assert visible - stop == min(recent, visible)
    assert first == min(sinks, stop)
    assert Persistent(sinks, recent).rows == sinks + recent


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rows(0), "Rows.rows must be a whole number of at least 1, got 0"),
        (lambda: Rows(-5), "Rows.rows"),
        (lambda: Rows(2.0), "Rows.rows"),
        (lambda: Rows(True), "Rows.rows"),
        (lambda: Rows("8"), "Rows.rows .* got '8'"),
        (lambda: Fraction(0), "Fraction.fraction must be more than 0 and at most 1, got 0"),
        (lambda: Fraction(1.01), "Fraction.fraction"),
        (lambda: Fraction(math.nan), "Fraction.fraction .* got nan"),
        (lambda: Fraction(True), "Fraction.fraction"),
        (lambda: Fraction("0.5"), "Fraction.fraction .* got '0.5'"),
        (lambda: Fraction(0.5, least=0), "Fraction.least"),
        (lambda: Threshold(-0.1, cap=8), "Threshold.margin must be a finite number of at least 0, got -0.1"),
        (lambda: Threshold(math.inf, cap=8), "Threshold.margin"),
        (lambda: Threshold(math.nan, cap=8), "Threshold.margin"),
        (lambda: Threshold("5", cap=8), "Threshold.margin"),
        (lambda: Threshold(5, cap=0), "Threshold.cap"),
        (lambda: EstimatedMass(0, cap=8), "EstimatedMass.mass"),
        (lambda: EstimatedMass(0.9, cap=0), "EstimatedMass.cap"),
        (lambda: Persistent(-1, 4), "Persistent.sinks must be a whole number of at least 0, got -1"),
        (lambda: Persistent(1.5, 4), "Persistent.sinks"),
        (lambda: Persistent(4, 0), "Persistent.recent"),
        (
            lambda: Threshold(5, cap=8, on_cap="drop"),
            "Threshold.on_cap must be one of CapFallback.TRUNCATE, CapFallback.EXACT, CapFallback.REFUSE",
        ),
        (lambda: EstimatedMass(0.9, cap=8, on_cap="exact"), "EstimatedMass.on_cap"),
    ],
)
def test_wrong_values_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        make()
    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_a_cap_truncates_unless_told() -> None:
    assert Threshold(5, cap=8).on_cap is EstimatedMass(0.9, cap=8).on_cap is CapFallback.TRUNCATE
