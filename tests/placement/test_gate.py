"""The live gate: every outcome from data, load and time, with a clock that the test turns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.budget import EstimatedMass, Fraction, Rows, SelectionBudget, Threshold
from kvstrata.contract.identity import CacheAbi, ChunkContext, ModelIdentity, PositionRule
from kvstrata.contract.method import AnswerClass
from kvstrata.cost.prepublication import EstimateSource, GateThresholds, Outcome, Phase
from kvstrata.cost.service_rates import Direction, ServiceObservation, ServiceRates
from kvstrata.errors import ConfigurationError, RetrievalError
from kvstrata.methods.calibrating import CalibrationSample, calibrate
from kvstrata.methods.calibration import Calibration, MassEstimate, budget_key
from kvstrata.methods.quest import Quest
from kvstrata.placement.gate import Gate, GateConfig, exact_fetch_ms, exact_recompute_ms, widened

CONTEXT = ChunkContext(
    ModelIdentity("id:m"), CacheAbi(2, 2, 1, 8, "float32"), PositionRule("default", 1e4), chunk_tokens=64
)
NARROW, WIDE = Rows(128), Rows(256)
CONFIG = GateConfig(GateThresholds(0.1, 0.9), step_ms=2.0)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recompute:
    """One millisecond for each token."""

    def __init__(self, observations: int = 3) -> None:
        self.observations = observations

    def seconds(self, start: int, stop: int) -> float:
        return (stop - start) / 1000


def _calibration() -> Calibration:
    """Raw estimates tell twice what is omitted under the narrow budget, and the wide one omits a tenth of that."""
    samples = []
    for place in range(100):
        raw = place / 100
        samples += [
            CalibrationSample(raw, raw / 2, budget_key(NARROW), 0),
            CalibrationSample(raw, raw / 20, budget_key(WIDE), 0),
        ]
    return calibrate(Quest(), CONTEXT, samples, confidence=0.9, bins=10)


def _gate(**changes: Any) -> tuple[Gate, Clock]:
    clock = Clock()
    return Gate(replace(CONFIG, **changes), _calibration(), clock), clock


def test_a_sharp_selection_is_accepted_and_a_flat_one_widens_once() -> None:
    gate, _ = _gate()
    deadline = gate.deadline()
    sharp = gate.decide(gate.estimate(0.05, NARROW, 0), Phase.INITIAL, 9.0, 9.0, deadline)
    assert (sharp.outcome, sharp.answer) == (Outcome.ACCEPT_APPROXIMATE, AnswerClass.APPROXIMATE)
    flat = gate.estimate(0.6, NARROW, 0)
    assert flat.omitted > 0.1
    assert gate.decide(flat, Phase.INITIAL, 9.0, 9.0, deadline).outcome is Outcome.WIDEN
    wider = gate.estimate(0.6, WIDE, 0)
    assert gate.decide(wider, Phase.POST_WIDEN, 9.0, 9.0, deadline).outcome is Outcome.ACCEPT_APPROXIMATE
    assert gate.decide(flat, Phase.POST_WIDEN, 1.0, 9.0, deadline).outcome is Outcome.FULL_EXACT_FETCH
    assert gate.counts == {Outcome.ACCEPT_APPROXIMATE: 2, Outcome.WIDEN: 1, Outcome.FULL_EXACT_FETCH: 1}


def test_the_deadline_decides_which_path_is_left() -> None:
    gate, clock = _gate(approximation_allowed=True)
    deadline = gate.deadline()
    flat = gate.estimate(0.6, NARROW, 0)

    def outcome() -> Outcome:
        return gate.decide(flat, Phase.POST_WIDEN, 1.5, 0.8, deadline).outcome

    assert outcome() is Outcome.FULL_EXACT_FETCH
    clock.now += 0.001
    assert outcome() is Outcome.RECOMPUTE_EXACT
    clock.now += 0.0005
    assert outcome() is Outcome.DECLARED_DEGRADATION
    clock.now += 1.0
    late = gate.decide(flat, Phase.POST_WIDEN, 1.5, 0.8, deadline)
    assert (late.outcome, late.state.deadline_slack_ms) == (Outcome.DECLARED_DEGRADATION, pytest.approx(-999.5))
    gate, _ = _gate()
    assert gate.decide(flat, Phase.POST_WIDEN, 9.0, 9.0, gate.deadline()).outcome is Outcome.REFUSE


def test_a_step_is_postponed_as_often_as_the_gate_allows() -> None:
    gate, _ = _gate(retries=2, retry_window_ms=1.0)
    flat = gate.estimate(0.6, NARROW, 0)
    outcomes = [
        gate.decide(flat, Phase.POST_WIDEN, 9.0, math.inf, gate.deadline(), attempt=attempt).outcome
        for attempt in range(3)
    ]
    assert outcomes == [Outcome.POSTPONE, Outcome.POSTPONE, Outcome.REFUSE]


def test_postponed_until_the_load_has_fallen() -> None:
    gate, clock = _gate(retries=1, retry_window_ms=1.0)
    deadline = gate.deadline()
    flat = gate.estimate(0.6, NARROW, 0)
    assert gate.decide(flat, Phase.POST_WIDEN, 9.0, 9.0, deadline).outcome is Outcome.POSTPONE
    clock.now += 0.001
    again = gate.decide(flat, Phase.POST_WIDEN, 0.5, 9.0, deadline, attempt=1)
    assert (again.outcome, again.answer) == (Outcome.FULL_EXACT_FETCH, AnswerClass.EXACT)


def test_an_exact_request_never_gets_an_approximate_answer() -> None:
    gate, _ = _gate(force_exact=True, approximation_allowed=True)
    sharp = gate.estimate(0.0, NARROW, 0)
    assert gate.decide(sharp, Phase.INITIAL, 1.0, 9.0, gate.deadline()).outcome is Outcome.FULL_EXACT_FETCH
    assert gate.decide(sharp, Phase.INITIAL, 9.0, 9.0, gate.deadline()).outcome is Outcome.REFUSE


@pytest.mark.parametrize("raw", [None, 0.0, 0.5])
def test_nothing_is_accepted_on_an_estimate_that_nobody_calibrated(raw: float | None) -> None:
    gate = Gate(CONFIG, None, Clock())
    estimate = gate.estimate(raw, NARROW, 0)
    assert estimate == MassEstimate(1.0, 0.0, EstimateSource.NONE, raw)
    assert gate.decide(estimate, Phase.INITIAL, 1.0, 9.0, gate.deadline()).outcome is Outcome.WIDEN
    assert gate.decide(estimate, Phase.POST_WIDEN, 1.0, 9.0, gate.deadline()).outcome is Outcome.FULL_EXACT_FETCH


def test_a_budget_that_was_not_sampled_is_not_calibrated() -> None:
    gate, _ = _gate()
    assert gate.estimate(0.01, Rows(129), 0).source is EstimateSource.NONE


@pytest.mark.parametrize("changes", [{"widen_factor": 1.0}, {}])
def test_nothing_widens_that_cannot(changes: dict[str, float]) -> None:
    gate, _ = _gate(**changes)
    flat = gate.estimate(0.6, NARROW, 0)
    decision = gate.decide(flat, Phase.INITIAL, 1.0, 9.0, gate.deadline(), can_widen=bool(changes))
    assert decision.outcome is Outcome.FULL_EXACT_FETCH


def test_without_a_deadline_the_exact_path_is_always_in_time() -> None:
    gate, _ = _gate(step_ms=math.inf)
    flat = gate.estimate(0.6, NARROW, 0)
    decision = gate.decide(flat, Phase.POST_WIDEN, 1e9, 1e9, gate.deadline())
    assert (decision.outcome, decision.state.deadline_slack_ms) == (Outcome.FULL_EXACT_FETCH, math.inf)


def test_an_estimator_s_answers_keep_their_class() -> None:
    gate = Gate(CONFIG, _calibration(), Clock(), AnswerClass.ESTIMATOR)
    decision = gate.decide(gate.estimate(0.05, NARROW, 0), Phase.INITIAL, 9.0, 9.0, gate.deadline())
    assert decision.answer is AnswerClass.ESTIMATOR


def test_dense_mass_is_refused() -> None:
    gate, _ = _gate()
    dense = MassEstimate(0.01, 1.0, EstimateSource.DENSE_REFERENCE)
    with pytest.raises(RetrievalError, match="online_gate_uses_dense_mass"):
        gate.decide(dense, Phase.INITIAL, 9.0, 9.0, gate.deadline())


def _rates(observations: int) -> ServiceRates:
    read = [ServiceObservation("disk", Direction.READ, 1000 * n, 0.001 + n / 1000) for n in range(1, observations + 1)]
    return ServiceRates.fitted(read)


def test_fetching_takes_what_was_measured() -> None:
    """1 ms fixed and a million bytes a second; a tier without observations is tried."""
    measured = exact_fetch_ms(lambda: _rates(3), {"disk": 5000, "host": 10**9}, transfers=2)
    assert measured == pytest.approx(2 * 1 + 5)
    assert exact_fetch_ms(lambda: _rates(2), {"disk": 5000}) == 0.0
    assert exact_fetch_ms(lambda: _rates(3), {"disk": 0}) == 0.0
    assert exact_fetch_ms(lambda: _rates(3), {}) == 0.0


def test_computing_again_is_a_path_once_it_was_timed() -> None:
    assert exact_recompute_ms(Recompute(), 64) == pytest.approx(64.0)
    assert exact_recompute_ms(Recompute(observations=2), 64) == math.inf
    assert exact_recompute_ms(None, 64) == math.inf


@pytest.mark.parametrize(
    ("budget", "wider"),
    [
        (Rows(100), Rows(150)),
        (Fraction(0.8, least=10), Fraction(1.0, least=15)),
        (Threshold(2.0, cap=64), Threshold(3.0, cap=96)),
        (EstimatedMass(0.7, cap=64), EstimatedMass(0.8, cap=96)),
        (EstimatedMass(1.0, cap=3), EstimatedMass(1.0, cap=5)),
    ],
)
def test_widening(budget: SelectionBudget, wider: SelectionBudget) -> None:
    found = widened(budget, 1.5)
    if isinstance(found, EstimatedMass) and isinstance(wider, EstimatedMass):
        assert (found.mass, found.cap) == (pytest.approx(wider.mass), wider.cap)
    else:
        assert found == wider
    assert widened(budget, 1.0).limit(10**6) == budget.limit(10**6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("widen_factor", 0.5),
        ("widen_factor", math.inf),
        ("step_ms", 0.0),
        ("step_ms", math.nan),
        ("retries", -1),
        ("retry_window_ms", -1.0),
        ("least_observations", 0),
    ],
)
def test_settings_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"GateConfig\.{field}={value}"):
        GateConfig(**{field: value})
