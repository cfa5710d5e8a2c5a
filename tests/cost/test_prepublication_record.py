"""A decision's record cannot say what was not decided, and each check is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from prepublication_states import STATES

from kvstrata.contract.method import AnswerClass
from kvstrata.cost.prepublication import GateThresholds, Outcome, Phase, PrepublicationState
from kvstrata.cost.prepublication_record import DECISION, PrepublicationDecision
from kvstrata.errors import Reason, RetrievalError

GATE = GateThresholds(0.1, 0.9)
BASE = PrepublicationState(0.05, 0.95, Phase.INITIAL, True, 9.0, 9.0, 2.0)
DOUBTFUL = replace(BASE, estimated_omitted_mass=0.2)
EXACT = replace(BASE, force_exact=True, exact_fetch_ms=1.0)
LATER = replace(BASE, force_exact=True, retryable=True, retry_window_ms=1.0)

WRONG: dict[str, tuple[PrepublicationState, dict[str, Any], Reason]] = {
    "exact_stays_exact": (
        EXACT,
        {"outcome": Outcome.ACCEPT_APPROXIMATE, "answer": AnswerClass.APPROXIMATE},
        Reason.EXACT_SILENTLY_DEGRADED,
    ),
    "widened_once": (DOUBTFUL, {"state": replace(DOUBTFUL, phase=Phase.POST_WIDEN)}, Reason.WIDEN_REPEATED),
    "retry_in_time": (LATER, {"state": replace(LATER, retry_window_ms=2.5)}, Reason.RETRY_EXCEEDS_SLACK),
    "label": (BASE, {"answer": AnswerClass.EXACT}, Reason.EXACTNESS_LABEL_MISMATCH),
    "unfinished": (DOUBTFUL, {"published": True}, Reason.UNFINISHED_PUBLISHED),
    "outcome_follows": (EXACT, {"outcome": Outcome.RECOMPUTE_EXACT}, Reason.OUTCOME_MISMATCH),
}
record_module: Any = import_module("kvstrata.cost.prepublication_record")


def _refusal(call: Callable[[], object]) -> Reason | None:
    try:
        call()
    except RetrievalError as error:
        return error.reason
    return None


@pytest.mark.parametrize("check", WRONG)
def test_each_check_refuses_and_is_needed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, changes, reason = WRONG[check]
    record = PrepublicationDecision.of(state, GATE)
    with pytest.raises(RetrievalError) as caught:
        replace(record, **changes)
    assert caught.value.reason is reason
    monkeypatch.setattr(record_module, "DECISION", tuple(one for one in DECISION if one.__name__ != check))
    assert _refusal(lambda: replace(record, **changes)) is not reason


def test_the_table_has_every_check() -> None:
    assert list(WRONG) == [check.__name__ for check in DECISION]


@pytest.mark.parametrize("answer", [AnswerClass.EXACT, AnswerClass.ESTIMATOR, None])
def test_labels(answer: AnswerClass | None) -> None:
    fetched = PrepublicationDecision.of(EXACT, GATE)
    assert fetched.answer is AnswerClass.EXACT
    if answer is not AnswerClass.EXACT:
        with pytest.raises(RetrievalError, match="exactness_label_mismatch"):
            replace(fetched, answer=answer)
    waiting = PrepublicationDecision.of(LATER, GATE)
    assert waiting.answer is None
    if answer is not None:
        with pytest.raises(RetrievalError, match="exactness_label_mismatch"):
            replace(waiting, answer=answer)


def test_an_estimator_s_answer_keeps_its_class() -> None:
    record = PrepublicationDecision.of(BASE, GATE, AnswerClass.ESTIMATOR)
    assert (record.outcome, record.answer) == (Outcome.ACCEPT_APPROXIMATE, AnswerClass.ESTIMATOR)
    assert replace(record, published=True).published


@pytest.mark.parametrize("outcome", ["use_arrived_rows", "accept_approximate", None])
def test_an_outcome_is_one_of_the_seven_and_no_text(outcome: Any) -> None:
    refused = PrepublicationDecision.of(replace(BASE, force_exact=True), GATE)
    assert refused.outcome is Outcome.REFUSE
    with pytest.raises(RetrievalError):
        replace(refused, outcome=outcome)


@given(STATES)
def test_every_decision_has_a_record(state: PrepublicationState) -> None:
    record = PrepublicationDecision.of(state, GATE)
    assert (record.answer is None) == (not record.outcome.publishes)
    assert not (state.force_exact and record.outcome.approximate)
