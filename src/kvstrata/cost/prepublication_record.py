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


def known_outcome(record: PrepublicationDecision) -> None:
    """The outcome is one of the seven."""
    if not isinstance(record.outcome, Outcome):
        raise _refused(Reason.OUTCOME_MISMATCH, "outcome", f"{record.outcome!r} is none of {', '.join(Outcome)}")


def exact_stays_exact(record: PrepublicationDecision) -> None:
    """A request that must be exact gets no approximate answer."""
    if record.state.force_exact and record.outcome.approximate:
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
        fits = not outcome.publishes
    else:
        fits = outcome.publishes and (found is AnswerClass.EXACT) == outcome.exact
    if not fits:
        raise _refused(Reason.EXACTNESS_LABEL_MISMATCH, "answer", f"{found!r} for the outcome {outcome}")


def unfinished(record: PrepublicationDecision) -> None:
    """Nothing is published of a step that widens, was postponed or is refused."""
    if record.published and not record.outcome.publishes:
        raise _refused(
            Reason.UNFINISHED_PUBLISHED, "published", f"an answer was published at the outcome {record.outcome}"
        )


def outcome_follows(record: PrepublicationDecision) -> None:
    """The outcome is the one that follows from the state."""
    wanted = decide_prepublication(record.state, record.thresholds)
    if record.outcome is not wanted:
        raise _refused(Reason.OUTCOME_MISMATCH, "outcome", f"{record.outcome} was presented, {wanted} follows")


DECISION: tuple[Callable[[PrepublicationDecision], None], ...] = (
    known_outcome,
    exact_stays_exact,
    widened_once,
    retry_in_time,
    label,
    unfinished,
    outcome_follows,
)


def _refused(reason: Reason, field: str, cause: str) -> RetrievalError:
    return RetrievalError(reason, f"{field}: {cause}", _REPORT, field=field)
