"""What the gate's decisions turn into for one sequence: one deadline, one recomputation, retries as configured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from chunks_and_faults import make_context

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.contract.method import Owner
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.cost.prepublication import GateThresholds, Outcome, Phase
from kvstrata.cost.service_rates import Direction, ServiceObservation
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.calibrating import CalibrationSample, calibrate
from kvstrata.methods.calibration import Calibration, budget_key
from kvstrata.methods.interface import Geometry
from kvstrata.methods.quest import Quest
from kvstrata.methods.selection import Selection
from kvstrata.placement.gate import Gate, GateConfig
from kvstrata.placement.gated import PostponedError, RecomputeError, StepGate
from kvstrata.placement.method_context import FrameContext
from kvstrata.placement.policy import SelectionPolicy
from kvstrata.runtime.gating import PrefillTimes
from kvstrata.store.service_ledger import ServiceLedger

METHOD = Quest(page_size=4)
GEOMETRY = Geometry(2, 4, 2, 8, 0.5, (None, None))


@dataclass
class Tokens:
    """As much of a history as a gate looks at."""

    frontier: int = 512
    named: bool = True


@dataclass
class Access:
    """As much of `RowAccess` as a gate looks at; chunks of 64 tokens and 1000 bytes."""

    gone: dict[int, set[int]] = field(default_factory=dict)
    history: Tokens = field(default_factory=Tokens)
    alone: bool = True
    chunk_tokens: int = 64

    def missing(self, layer: int) -> set[int]:
        return self.gone.get(layer, set())

    def missing_bytes(self, layer: int) -> dict[str, int]:
        return {"files": 1000 * len(self.missing(layer))} if self.missing(layer) else {}

    @property
    def first_missing(self) -> int:
        return min(min(chunks) for chunks in self.gone.values())


class Case:
    """A gate over files that read 1000 bytes in 50 ms, and an engine that computes a row in 0.1 ms once it was timed.

    Raw estimates are bounds: of `Rows(64)` and of `Rows(128)` samples say that a raw one is right.
    """

    def __init__(self, config: GateConfig, *, timed: bool = False, knows: bool = True, visible: int = 513) -> None:
        self.now = 0.0
        self.rates, self.times = ServiceLedger(), PrefillTimes()
        for _ in range(3):
            self.rates.record(ServiceObservation("files", Direction.READ, 1000, 0.05))
            if timed:
                self.times.record(0, 100, 0.01)
        self.access = Access()
        self.gate = Gate(config, artefact() if knows else None, lambda: self.now)
        self.step = StepGate(self.gate, self.rates, self.times, self.access)  # type: ignore[arg-type]
        policy = SelectionPolicy(METHOD, Rows(64), Persistent(2, 9))
        self.context = FrameContext(policy, GEOMETRY, None, None, None)  # type: ignore[arg-type]
        self.context.begin_step(visible - 1, 1)
        self.context.enter(0)
        self.step.begin_step()

    def decide(self, raw: float | None, phase: Phase = Phase.INITIAL, layer: int = 0) -> LayerOutcome | None:
        estimate = None if raw is None else torch.tensor([raw / 2, raw])
        selection = Selection(Owner.KV_HEAD, torch.zeros(2, 1, dtype=torch.int64), 1, estimate=estimate)
        return self.step.decide(layer, selection, self.context, phase)


def artefact() -> Calibration:
    samples = [
        CalibrationSample(share / 10, share / 10, budget_key(budget), 0)
        for budget in (Rows(64), Rows(128))
        for share in range(10)
        for _ in range(9)
    ]
    return calibrate(METHOD, make_context(), samples, confidence=0.8, bins=10)


LIMIT = GateThresholds(0.3, 0.8)


def test_a_selection_within_the_limits_is_taken() -> None:
    case = Case(GateConfig(LIMIT, step_ms=10))
    assert case.decide(0.2) is LayerOutcome.SELECTED
    assert case.decide(0.2, Phase.POST_WIDEN) is LayerOutcome.WIDENED


def test_one_past_them_is_widened_once_and_then_read_in_full() -> None:
    case = Case(GateConfig(LIMIT))
    assert case.decide(0.5) is None
    case.context.widen(2.0)
    assert case.decide(0.5, Phase.POST_WIDEN) is LayerOutcome.GATE
    assert case.gate.counts == {Outcome.WIDEN: 1, Outcome.FULL_EXACT_FETCH: 1}


def test_what_could_not_be_accepted_is_not_searched_for() -> None:
    assert Case(GateConfig(LIMIT), knows=False).decide(0.0) is LayerOutcome.GATE
    assert Case(GateConfig(LIMIT), visible=64).decide(0.5) is LayerOutcome.GATE, "the budget covers everything"
    case = Case(GateConfig(LIMIT, widen_factor=1.5))
    assert case.decide(0.5) is LayerOutcome.GATE, "a budget of 96 rows was not sampled"


def test_a_method_without_an_estimate_has_that_of_the_whole_bin() -> None:
    case = Case(GateConfig(LIMIT))
    assert case.decide(None) is LayerOutcome.SELECTED, "its samples of no opinion omitted nothing"


def late(config: dict[str, Any], **kwargs: Any) -> Case:
    """Two chunks are missing that take 100 ms to read, of a step that has 40."""
    case = Case(GateConfig(LIMIT, step_ms=40, **config), **kwargs)
    case.access.gone = {0: {3, 5}, 1: {2}}
    return case


def test_rows_are_computed_again_from_the_first_that_is_missing_anywhere() -> None:
    case = late({"force_exact": True}, timed=True)
    with pytest.raises(RecomputeError) as caught:
        case.decide(0.0)
    assert caught.value.position == 2 * 64
    assert caught.value.history is case.access.history
    case.access.gone = {}
    case.now = 99.0
    assert case.decide(0.9) is LayerOutcome.GATE, "it was decided, and is not decided again"
    assert case.gate.counts == {Outcome.RECOMPUTE_EXACT: 1}


def test_rows_are_computed_again_once() -> None:
    case = late({"force_exact": True}, timed=True)
    with pytest.raises(RecomputeError):
        case.decide(0.0)
    with pytest.raises(RetrievalError) as caught:
        case.decide(0.0)
    assert caught.value.reason is Reason.NO_LEGAL_PATH
    case.step.end_step()
    case.step.begin_step()
    with pytest.raises(RecomputeError):
        case.decide(0.0)


@pytest.mark.parametrize("why", ["untimed", "unnamed", "not alone", "too long"])
def test_rows_that_cannot_be_computed_again_in_time_are_not(why: str) -> None:
    case = late({"force_exact": True}, timed=why != "untimed")
    case.access.history.named = why != "unnamed"
    case.access.alone = why != "not alone"
    if why == "too long":
        case.access.history.frontier = 5000
    with pytest.raises(RetrievalError) as caught:
        case.decide(0.0)
    assert caught.value.reason is Reason.NO_LEGAL_PATH
    assert caught.value.field == "gate"


def test_a_step_is_postponed_as_often_as_the_gate_says_and_under_one_deadline() -> None:
    case = late({"force_exact": True, "retries": 2, "retry_window_ms": 4})
    for _ in range(2):
        with pytest.raises(PostponedError) as caught:
            case.decide(0.0)
        assert caught.value.retry_ms == 4
        case.now += 0.004
        case.step.begin_step()
    with pytest.raises(RetrievalError):
        case.decide(0.0)
    case.step.end_step()
    case.step.begin_step()
    case.now += 0.037
    with pytest.raises(RetrievalError):
        case.decide(0.0)  # 3 ms are left, which is less than the window
    assert case.gate.counts == {Outcome.POSTPONE: 2, Outcome.REFUSE: 2}


def test_a_step_that_is_tried_again_keeps_its_deadline() -> None:
    case = late({"force_exact": True})
    case.access.gone = {0: {1}}
    case.rates.record(ServiceObservation("files", Direction.READ, 1000, 0.05))
    case.now = 0.035
    case.step.begin_step()
    case.access.gone = {}
    assert case.decide(0.0) is LayerOutcome.GATE
    case.now = 0.041
    case.step.begin_step()
    with pytest.raises(RetrievalError):
        case.decide(0.0)


def test_other_steps_in_between_have_deadlines_of_their_own() -> None:
    case = late({"force_exact": True}, timed=True)
    with pytest.raises(RecomputeError):
        case.decide(0.0)
    with case.step.set_aside():
        case.now = 0.030
        case.step.begin_step()
        with pytest.raises(RecomputeError):
            case.decide(0.0)
        case.step.end_step()
    case.step.begin_step()
    with pytest.raises(RetrievalError):
        case.decide(0.0)
    with pytest.raises(ZeroDivisionError), case.step.set_aside():
        raise ZeroDivisionError
    case.access.gone = {}
    assert case.decide(0.0) is LayerOutcome.GATE


def test_a_late_answer_is_degraded_where_that_is_allowed() -> None:
    case = late({"approximation_allowed": True, "widen_factor": 1})
    assert case.decide(0.9) is LayerOutcome.DEGRADED
    assert case.gate.counts == {Outcome.DECLARED_DEGRADATION: 1}
    strict = late({"approximation_allowed": True, "force_exact": True})
    with pytest.raises(RetrievalError):
        strict.decide(0.0)


def test_a_refusal_says_what_was_known() -> None:
    case = late({"widen_factor": 1})
    with pytest.raises(RetrievalError) as caught:
        case.decide(0.65, layer=1)
    assert "layer 1" in caught.value.cause
    assert "read 50 ms" in caught.value.cause
    assert f"compute again {math.inf}" in caught.value.cause
