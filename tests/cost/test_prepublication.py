"""All combinations of what the decision looks at, and what may never come out of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepublication_states import STATES

from kvstrata.cost.prepublication import (
    EstimateSource,
    GateThresholds,
    Outcome,
    Phase,
    PrepublicationState,
    decide_prepublication,
)
from kvstrata.errors import ConfigurationError, Reason, RetrievalError

GATE = GateThresholds(0.1, 0.9)
BASE = PrepublicationState(0.05, 0.95, Phase.INITIAL, True, 9.0, 9.0, 2.0, retryable=False, retry_window_ms=9.0)

TABLE = {
    # (uncertain, may widen now, fetch in time, recompute in time, retry in time, degradation allowed, must be exact)
    Outcome.ACCEPT_APPROXIMATE: (False, None, None, None, None, None, False),
    Outcome.WIDEN: (True, True, None, None, None, None, None),
    Outcome.FULL_EXACT_FETCH: (None, None, True, None, None, None, None),
    Outcome.RECOMPUTE_EXACT: (None, None, None, True, None, None, None),
    Outcome.POSTPONE: (None, None, None, None, True, None, None),
    Outcome.DECLARED_DEGRADATION: (None, None, None, None, None, True, False),
    Outcome.REFUSE: (None,) * 7,
}
"""The first row that fits gives the outcome; `None` fits both."""


@pytest.mark.parametrize("case", list(product([False, True], repeat=7)))
def test_every_combination(case: tuple[bool, ...]) -> None:
    uncertain, may_widen, fetch, recompute, retry, degraded, exact = case
    wanted = next(
        outcome
        for outcome, row in TABLE.items()
        if all(cell is None or cell == value for cell, value in zip(row, case, strict=True))
    )
    ways = [
        (Phase.INITIAL, True) if may_widen else (Phase.INITIAL, False),
        (Phase.INITIAL, True) if may_widen else (Phase.POST_WIDEN, True),
    ]
    doubts = [(0.2, 0.95), (0.05, 0.5), (0.2, 0.5)] if uncertain else [(0.1, 0.9), (0.0, 1.0)]
    late = [(True, 2.5), (False, 1.0)]
    for (phase, can_widen), (omitted, confidence), (retryable, window) in product(
        ways, doubts, [(True, 2.0)] if retry else late
    ):
        state = PrepublicationState(
            omitted,
            confidence,
            phase,
            can_widen,
            2.0 if fetch else 2.5,
            1.0 if recompute else math.inf,
            2.0,
            retryable,
            window,
            degraded,
            exact,
        )
        assert decide_prepublication(state, GATE) is wanted


def test_all_seven_are_in_the_table_and_reachable() -> None:
    assert set(TABLE) == set(Outcome)
    assert len(Outcome) == 7


def test_limits_belong_to_what_is_accepted() -> None:
    at = replace(BASE, estimated_omitted_mass=0.1, confidence=0.9)
    assert decide_prepublication(at, GATE) is Outcome.ACCEPT_APPROXIMATE
    assert decide_prepublication(replace(at, estimated_omitted_mass=math.nextafter(0.1, 1)), GATE) is Outcome.WIDEN
    assert decide_prepublication(replace(at, confidence=math.nextafter(0.9, 0)), GATE) is Outcome.WIDEN


def test_a_path_that_takes_for_ever_is_none_even_without_a_deadline() -> None:
    state = replace(
        BASE, force_exact=True, exact_fetch_ms=math.inf, exact_recompute_ms=math.inf, deadline_slack_ms=math.inf
    )
    assert decide_prepublication(state, GATE) is Outcome.REFUSE
    assert decide_prepublication(replace(state, exact_recompute_ms=1e9), GATE) is Outcome.RECOMPUTE_EXACT


def test_after_the_deadline_only_refusal_and_degradation_are_left() -> None:
    late = replace(BASE, estimated_omitted_mass=1.0, phase=Phase.POST_WIDEN, exact_fetch_ms=0.0, deadline_slack_ms=-1.0)
    assert decide_prepublication(late, GATE) is Outcome.DECLARED_DEGRADATION
    assert decide_prepublication(replace(late, approximation_allowed=False), GATE) is Outcome.REFUSE


@given(STATES, st.floats(0, 1), st.floats(0, 1))
def test_an_exact_request_gets_no_approximate_answer(state: PrepublicationState, mass: float, least: float) -> None:
    outcome = decide_prepublication(replace(state, force_exact=True), GateThresholds(mass, least))
    assert not outcome.approximate


@given(STATES)
def test_a_step_widens_once(state: PrepublicationState) -> None:
    outcome = decide_prepublication(state, GATE)
    if outcome is Outcome.WIDEN:
        assert state.phase is Phase.INITIAL
        again = decide_prepublication(replace(state, phase=Phase.POST_WIDEN), GATE)
        assert again is not Outcome.WIDEN


@given(STATES)
def test_an_exact_path_is_in_time_and_a_retry_too(state: PrepublicationState) -> None:
    outcome = decide_prepublication(state, GATE)
    takes = {
        Outcome.FULL_EXACT_FETCH: state.exact_fetch_ms,
        Outcome.RECOMPUTE_EXACT: state.exact_recompute_ms,
        Outcome.POSTPONE: state.retry_window_ms,
    }
    if outcome in takes:
        assert takes[outcome] <= state.deadline_slack_ms
        assert math.isfinite(takes[outcome])


@given(STATES)
def test_a_refusal_publishes_nothing_and_means_that_nothing_else_was_left(state: PrepublicationState) -> None:
    outcome = decide_prepublication(state, GATE)
    assert outcome.publishes == (outcome.approximate or outcome.exact)
    if outcome is Outcome.REFUSE:
        assert not outcome.publishes
        assert state.force_exact or not state.approximation_allowed
        assert state.exact_fetch_ms > state.deadline_slack_ms or math.isinf(state.exact_fetch_ms)


@given(STATES)
def test_more_confidence_and_less_mass_never_make_it_worse(state: PrepublicationState) -> None:
    if decide_prepublication(state, GATE) is Outcome.ACCEPT_APPROXIMATE:
        better = replace(state, estimated_omitted_mass=state.estimated_omitted_mass / 2, confidence=1.0)
        assert decide_prepublication(better, GATE) is Outcome.ACCEPT_APPROXIMATE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("estimated_omitted_mass", 1.1),
        ("estimated_omitted_mass", math.nan),
        ("confidence", -0.1),
        ("confidence", True),
        ("exact_fetch_ms", -1.0),
        ("exact_recompute_ms", math.nan),
        ("retry_window_ms", -1.0),
        ("deadline_slack_ms", math.nan),
        ("deadline_slack_ms", "2"),
        ("phase", "initial"),
        ("source", "calibration"),
        ("can_widen", 1),
        ("retryable", None),
        ("approximation_allowed", 0),
        ("force_exact", "no"),
    ],
)
def test_a_state_that_cannot_be_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"PrepublicationState.{field} must be .*") as caught:
        replace(BASE, **{field: value})
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("mass", "confidence"), [(1.2, 0.9), (-0.1, 0.9), (0.1, 1.1), (0.1, -0.1), (math.nan, 0.9)])
def test_thresholds_are_shares(mass: float, confidence: float) -> None:
    with pytest.raises(ConfigurationError, match="GateThresholds"):
        GateThresholds(mass, confidence)


def test_the_gate_takes_no_dense_mass() -> None:
    with pytest.raises(RetrievalError) as caught:
        replace(BASE, source=EstimateSource.DENSE_REFERENCE)
    assert caught.value.reason is Reason.ONLINE_GATE_USES_DENSE_MASS
