"""The decision of one step as a record that is checked before anything is published.

Checks run in order when a record is made, also by `dataclasses.replace`; the first that fails gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.contract.method import AnswerClass
from kvstrata.cost.prepublication import GateThresholds, Outcome, Phase, PrepublicationState, decide_prepublication
from kvstrata.errors import Reason, RetrievalError

__all__ = ["DECISION", "PrepublicationDecision"]

_APPROXIMATE = frozenset(outcome for outcome in Outcome if outcome.approximate)
_EXACT = frozenset(outcome for outcome in Outcome if outcome.exact)
_PUBLISHES = _APPROXIMATE | _EXACT
_REPORT = "this is a defect of the caller: publish only what the gate decided"


@dataclass(frozen=True, slots=True)
class PrepublicationDecision:
    """outcome: of `state` under `thresholds`. answer: class of what is published, `None` when nothing is. published:
    whether it was.

    Errors: `RetrievalError` of the first check in `DECISION` that fails.
    """

    state: PrepublicationState
    thresholds: GateThresholds
    outcome: Outcome
    answer: AnswerClass | None
    published: bool = False

    def __post_init__(self) -> None:
        for check in DECISION:
            check(self)

    @classmethod
    def of(
        cls, state: PrepublicationState, thresholds: GateThresholds, answer: AnswerClass = AnswerClass.APPROXIMATE
    ) -> PrepublicationDecision:
        """Decide. answer: class of the method's own answers."""
        outcome = decide_prepublication(state, thresholds)
        label = AnswerClass.EXACT if outcome.exact else answer
        return cls(state, thresholds, outcome, label if outcome.publishes else None)


def exact_stays_exact(record: PrepublicationDecision) -> None:
    """A request that must be exact gets no approximate answer."""
    if record.state.force_exact and record.outcome in _APPROXIMATE:
        raise _refused(Reason.EXACT_SILENTLY_DEGRADED, "outcome", f"{record.outcome} for a request that must be exact")


def widened_once(record: PrepublicationDecision) -> None:
    """A step widens its search once."""
    if record.outcome is Outcome.WIDEN and record.state.phase is not Phase.INITIAL:
        raise _refused(Reason.WIDEN_REPEATED, "outcome", f"the search was widened before: phase {record.state.phase}")


def retry_in_time(record: PrepublicationDecision) -> None:
    """A step is postponed only when its retry still meets the deadline."""
    window, slack = record.state.retry_window_ms, record.state.deadline_slack_ms
    if record.outcome is Outcome.POSTPONE and window > slack:
        cause = f"a retry within {window:g} ms does not meet a deadline {slack:g} ms away"
        raise _refused(Reason.RETRY_EXCEEDS_SLACK, "state.retry_window_ms", cause)


def label(record: PrepublicationDecision) -> None:
    """What leaves rows out is not called exact, and what does not is."""
    found, outcome = record.answer, record.outcome
    if found is None:
        fits = outcome not in _PUBLISHES
    else:
        fits = outcome in (_EXACT if found is AnswerClass.EXACT else _APPROXIMATE)
    if not fits:
        raise _refused(Reason.EXACTNESS_LABEL_MISMATCH, "answer", f"{found!r} for the outcome {outcome}")


def unfinished(record: PrepublicationDecision) -> None:
    """Nothing is published of a step that widens, was postponed or is refused."""
    if record.published and record.outcome not in _PUBLISHES:
        raise _refused(
            Reason.UNFINISHED_PUBLISHED, "published", f"an answer was published at the outcome {record.outcome}"
        )


def outcome_follows(record: PrepublicationDecision) -> None:
    """The outcome is the one of the seven that follows from the state."""
    wanted = decide_prepublication(record.state, record.thresholds)
    if record.outcome is not wanted:
        raise _refused(Reason.OUTCOME_MISMATCH, "outcome", f"{record.outcome} was presented, {wanted} follows")


DECISION: tuple[Callable[[PrepublicationDecision], None], ...] = (
    exact_stays_exact,
    widened_once,
    retry_in_time,
    label,
    unfinished,
    outcome_follows,
)


def _refused(reason: Reason, field: str, cause: str) -> RetrievalError:
    return RetrievalError(reason, f"{field}: {cause}", _REPORT, field=field)
