"""The live gate's settings, its knowledge of budgets, and what exact answers would take."""

from __future__ import annotations

import math
from typing import Any

import pytest
from chunks_and_faults import make_context
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.budget import EstimatedMass, Fraction, Rows, SelectionBudget, Threshold
from kvstrata.cost.prepublication import EstimateSource, GateThresholds, Outcome, Phase
from kvstrata.cost.service_rates import Direction, ServiceObservation
from kvstrata.errors import ConfigurationError, Reason, RetrievalError
from kvstrata.methods.calibrating import CalibrationSample, calibrate
from kvstrata.methods.calibration import Calibration, MassEstimate, budget_key
from kvstrata.methods.quest import Quest
from kvstrata.placement.gate import Gate, GateConfig, exact_fetch_ms, exact_recompute_ms, widened
from kvstrata.runtime.gating import PrefillTimes
from kvstrata.store.service_ledger import ServiceLedger


def calibration(*budgets: SelectionBudget, layer: int | None = None) -> Calibration:
    samples = [
        CalibrationSample(raw / 20, raw / 40, budget_key(budget), layer or 0) for budget in budgets for raw in range(20)
    ]
    return calibrate(Quest(), make_context(), samples, confidence=0.8, bins=4, per_layer=layer is not None)


def known(omitted: float, confidence: float = 0.95) -> MassEstimate:
    return MassEstimate(omitted, confidence, EstimateSource.CALIBRATION, 0.1)


def test_a_deadline_counts_from_the_clock() -> None:
    assert Gate(GateConfig(step_ms=250), None, lambda: 8.0).deadline() == 8.25
    assert Gate(GateConfig(), None, lambda: 8.0).deadline() == math.inf


def test_without_an_artefact_nothing_is_known_and_nothing_is_widened() -> None:
    gate = Gate(GateConfig(), None, lambda: 0.0)
    assert gate.estimate(0.01, Rows(64), 0) == MassEstimate.none(0.01)
    assert not gate.can_widen(Rows(64), 0)


def test_the_estimate_is_that_of_the_budget_in_force() -> None:
    gate = Gate(GateConfig(), calibration(Rows(64)), lambda: 0.0)
    found = gate.estimate(0.5, Rows(64), 3)
    assert (found.source, found.confidence, found.raw) == (EstimateSource.CALIBRATION, 0.8, 0.5)
    assert 0.2 < found.omitted < 1
    assert gate.estimate(0.5, Rows(128), 3) == MassEstimate.none(0.5), "another budget was not sampled"


def test_a_budget_is_widened_if_the_wider_one_was_sampled() -> None:
    gate = Gate(GateConfig(), calibration(Rows(64), Rows(128)), lambda: 0.0)
    assert gate.can_widen(Rows(64), 0)
    assert not gate.can_widen(Rows(128), 0)
    assert not Gate(GateConfig(widen_factor=1), gate.calibration, lambda: 0.0).can_widen(Rows(64), 0)
    assert not Gate(GateConfig(widen_factor=3), gate.calibration, lambda: 0.0).can_widen(Rows(64), 0)


@pytest.mark.parametrize(
    ("budget", "wider"),
    [
        (Rows(64), Rows(128)),
        (Fraction(0.25, least=10), Fraction(0.5, least=20)),
        (Fraction(0.75), Fraction(1.0, least=2)),
        (Threshold(1.5, cap=100), Threshold(3.0, cap=200)),
        (EstimatedMass(0.9, cap=50), EstimatedMass(0.95, cap=100)),
    ],
)
def test_a_budget_widens_by_the_factor(budget: SelectionBudget, wider: SelectionBudget) -> None:
    assert widened(budget, 2.0) == wider
    assert widened(budget, 1.0) == budget


@given(
    budget=st.one_of(
        st.builds(Rows, st.integers(1, 5000)),
        st.builds(Fraction, st.floats(0.001, 1), st.integers(1, 100)),
        st.builds(Threshold, st.floats(0, 10), st.integers(1, 5000)),
        st.builds(EstimatedMass, st.floats(0.01, 1), st.integers(1, 5000)),
    ),
    factor=st.floats(1, 10),
    visible=st.integers(1, 10_000),
)
def test_a_wider_budget_allows_no_less(budget: SelectionBudget, factor: float, visible: int) -> None:
    assert widened(budget, factor).limit(visible) >= budget.limit(visible)


def test_reads_cost_what_was_measured_of_their_tiers() -> None:
    ledger = ServiceLedger()
    for size in (1000, 2000, 3000):
        ledger.record(ServiceObservation("files", Direction.READ, size, 0.001 + size / 1e6))
    ledger.record(ServiceObservation("host", Direction.READ, 1000, 5.0))
    assert exact_fetch_ms(ledger.rates, {"files": 4000}, transfers=2) == pytest.approx(2 * 1 + 4)
    assert exact_fetch_ms(ledger.rates, {}) == 0.0
    assert exact_fetch_ms(ledger.rates, {"host": 9000}) == 0.0, "measured too seldom: it is tried"
    assert exact_fetch_ms(ledger.rates, {"host": 1000}, least_observations=1) == pytest.approx(5000)
    assert exact_fetch_ms(ledger.rates, {"files": 0, "link": 5}) == 0.0


def test_computing_again_costs_what_was_timed() -> None:
    times = PrefillTimes()
    assert exact_recompute_ms(None, 100) == math.inf
    assert exact_recompute_ms(times, 100) == math.inf
    for start in (0, 100, 200):
        times.record(start, 100, 0.1)
    assert exact_recompute_ms(times, 300) == pytest.approx(300)
    assert exact_recompute_ms(times, 300, start=200) == pytest.approx(100)
    assert exact_recompute_ms(times, 300, 4) == math.inf


def test_decisions_are_counted() -> None:
    now = [0.0]
    gate = Gate(GateConfig(GateThresholds(0.1, 0.9), retries=1, retry_window_ms=5), None, lambda: now[0])
    deadline = 0.1
    decide = {
        Outcome.ACCEPT_APPROXIMATE: (known(0.05), 0.0, math.inf),
        Outcome.WIDEN: (known(0.5), 0.0, math.inf),
        Outcome.RECOMPUTE_EXACT: (known(0.5), 500.0, 20.0),
        Outcome.POSTPONE: (known(0.5), 500.0, math.inf),
    }
    for outcome, (estimate, fetch, again) in decide.items():
        phase = Phase.INITIAL if outcome is Outcome.WIDEN else Phase.POST_WIDEN
        assert gate.decide(estimate, phase, fetch, again, deadline).outcome is outcome
    assert gate.decide(known(0.5), Phase.POST_WIDEN, 500.0, math.inf, deadline, attempt=1).outcome is Outcome.REFUSE
    now[0] = 0.0951
    assert gate.decide(known(0.5), Phase.POST_WIDEN, 0.0, math.inf, deadline).outcome is Outcome.FULL_EXACT_FETCH
    now[0] = 0.2
    assert gate.decide(known(0.5), Phase.POST_WIDEN, 0.0, math.inf, deadline).outcome is Outcome.REFUSE
    assert gate.counts == dict.fromkeys(decide, 1) | {Outcome.FULL_EXACT_FETCH: 1, Outcome.REFUSE: 2}


def test_a_mass_that_only_dense_attention_knows_decides_nothing() -> None:
    gate = Gate(GateConfig(), None, lambda: 0.0)
    measured = MassEstimate(0.05, 1.0, EstimateSource.DENSE_REFERENCE)
    with pytest.raises(RetrievalError) as caught:
        gate.decide(measured, Phase.INITIAL, 0.0, math.inf, 1.0)
    assert caught.value.reason is Reason.ONLINE_GATE_USES_DENSE_MASS
    assert not gate.counts


@pytest.mark.parametrize(
    "changes", [{"digest": "00"}, {"format": 2}, {"confidence": 0.99}, {"curves": []}, {"curves": 3}, {"binding": {}}]
)
def test_an_artefact_that_was_altered_is_refused(changes: dict[str, Any]) -> None:
    data = calibration(Rows(64)).to_json()
    assert Calibration.from_json(data) == calibration(Rows(64))
    for damaged in (data | changes, {}, None, [data]):
        with pytest.raises(ConfigurationError) as caught:
            Calibration.from_json(damaged)
        assert caught.value.reason is Reason.CALIBRATION_DAMAGED
