"""What becomes of an approximate answer before anything of it is published: seven outcomes, one pure function.

Dense attention alone knows how much mass a selection left out. What decides here is therefore an *estimate* with a
stated confidence, and the time until the deadline. In this order: accept what the estimate allows; widen the search
once; read the full history; compute it again; postpone the step until an exact path is open; publish a declared
degradation; refuse. A request that must be exact comes to neither of the approximate outcomes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.errors import ConfigurationError, Reason, RetrievalError

__all__ = ["EstimateSource", "GateThresholds", "Outcome", "Phase", "PrepublicationState", "decide_prepublication"]


class Outcome(StrEnum):
    """What a step does with its selection.

    ACCEPT_APPROXIMATE publishes it. WIDEN selects again with a wider budget. FULL_EXACT_FETCH reads every legal row,
    RECOMPUTE_EXACT computes them again: exact, both. POSTPONE publishes nothing until an exact path is open.
    DECLARED_DEGRADATION publishes it although its estimate passes the limits, and says so. REFUSE publishes nothing.
    """

    ACCEPT_APPROXIMATE = "accept_approximate"
    WIDEN = "widen"
    FULL_EXACT_FETCH = "full_exact_fetch"
    RECOMPUTE_EXACT = "recompute_exact"
    POSTPONE = "postpone"
    DECLARED_DEGRADATION = "declared_degradation"
    REFUSE = "refuse"

    @property
    def approximate(self) -> bool:
        """Whether what is published leaves rows out."""
        return self in (Outcome.ACCEPT_APPROXIMATE, Outcome.DECLARED_DEGRADATION)

    @property
    def exact(self) -> bool:
        """Whether what is published has every legal row in it."""
        return self in (Outcome.FULL_EXACT_FETCH, Outcome.RECOMPUTE_EXACT)

    @property
    def publishes(self) -> bool:
        """Whether there is anything to publish."""
        return self.approximate or self.exact


class Phase(StrEnum):
    """INITIAL: the first selection of a step. POST_WIDEN: the wider one, after which none is tried."""

    INITIAL = "initial"
    POST_WIDEN = "post_widen"


class EstimateSource(StrEnum):
    """Where an estimate of the omitted mass comes from.

    CALIBRATION: the method's own, made conservative by a calibration artefact. NONE: there is none; mass 1 and
    confidence 0. DENSE_REFERENCE: measured by dense attention, which no step that is still to be decided has run;
    refused.
    """

    CALIBRATION = "calibration"
    NONE = "none"
    DENSE_REFERENCE = "dense_reference"


@dataclass(frozen=True, slots=True)
class GateThresholds:
    """What may be accepted: at most this estimated omitted mass, at no less than this confidence. Both in [0, 1].

    Errors: `ConfigurationError` for a value outside.
    """

    max_estimated_omitted_mass: float = 0.1
    min_confidence: float = 0.9

    def __post_init__(self) -> None:
        _require_share("GateThresholds.max_estimated_omitted_mass", self.max_estimated_omitted_mass)
        _require_share("GateThresholds.min_confidence", self.min_confidence)


@dataclass(frozen=True, slots=True)
class PrepublicationState:
    """What is known of one selection before its answer is published. Times in ms.

    estimated_omitted_mass, confidence: in [0, 1]. can_widen: a wider selection is possible. exact_fetch_ms,
    exact_recompute_ms: until an exact answer is there, infinite where there is no such path. deadline_slack_ms: until
    the deadline; negative once it has passed, infinite without one. retryable: the step may be run again later, within
    retry_window_ms. approximation_allowed: an answer past the limits may be published as degraded. force_exact: no
    approximate answer may be published.

    Errors: `ConfigurationError` naming the field; `RetrievalError` with ONLINE_GATE_USES_DENSE_MASS.
    """

    estimated_omitted_mass: float
    confidence: float
    phase: Phase
    can_widen: bool
    exact_fetch_ms: float
    exact_recompute_ms: float
    deadline_slack_ms: float
    retryable: bool = False
    retry_window_ms: float = 0.0
    approximation_allowed: bool = True
    force_exact: bool = False
    source: EstimateSource = EstimateSource.CALIBRATION

    def __post_init__(self) -> None:
        _require_share("PrepublicationState.estimated_omitted_mass", self.estimated_omitted_mass)
        _require_share("PrepublicationState.confidence", self.confidence)
        for field in ("exact_fetch_ms", "exact_recompute_ms", "retry_window_ms"):
            _require_ms(f"PrepublicationState.{field}", getattr(self, field), least=0.0)
        _require_ms("PrepublicationState.deadline_slack_ms", self.deadline_slack_ms, least=-math.inf)
        for field in ("can_widen", "retryable", "approximation_allowed", "force_exact"):
            if not isinstance(getattr(self, field), bool):
                raise _invalid(f"PrepublicationState.{field}", getattr(self, field), "True or False")
        for field, kind in (("phase", Phase), ("source", EstimateSource)):
            if not isinstance(getattr(self, field), kind):
                raise _invalid(f"PrepublicationState.{field}", getattr(self, field), f"one of {', '.join(kind)}")
        require_online(self.source)

    def uncertain(self, thresholds: GateThresholds) -> bool:
        """Whether the estimate does not allow to accept the selection."""
        return (
            self.estimated_omitted_mass > thresholds.max_estimated_omitted_mass
            or self.confidence < thresholds.min_confidence
        )


def require_online(source: EstimateSource) -> None:
    """Errors: `RetrievalError` with ONLINE_GATE_USES_DENSE_MASS for a mass that only dense attention knows."""
    if source is EstimateSource.DENSE_REFERENCE:
        raise RetrievalError(
            Reason.ONLINE_GATE_USES_DENSE_MASS,
            "estimate.source: the omitted mass was measured by dense attention, which has not run when a step decides",
            "pass a calibrated estimate; dense measures belong into the calibration's samples",
            field="estimate.source",
        )


def decide_prepublication(state: PrepublicationState, thresholds: GateThresholds) -> Outcome:
    """The outcome for `state`. Pure.

    A step that widens is decided again in phase POST_WIDEN, so it widens once. An exact path counts while it is there
    before the deadline; one that takes infinite time is none.
    """
    uncertain = state.uncertain(thresholds)
    if not (state.force_exact or uncertain):
        return Outcome.ACCEPT_APPROXIMATE
    if uncertain and state.can_widen and state.phase is Phase.INITIAL:
        return Outcome.WIDEN
    if _meets(state.exact_fetch_ms, state.deadline_slack_ms):
        return Outcome.FULL_EXACT_FETCH
    if _meets(state.exact_recompute_ms, state.deadline_slack_ms):
        return Outcome.RECOMPUTE_EXACT
    if state.retryable and _meets(state.retry_window_ms, state.deadline_slack_ms):
        return Outcome.POSTPONE
    if state.approximation_allowed and not state.force_exact:
        return Outcome.DECLARED_DEGRADATION
    return Outcome.REFUSE


def _meets(takes_ms: float, slack_ms: float) -> bool:
    return math.isfinite(takes_ms) and takes_ms <= slack_ms


def _require_share(field: str, value: float) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise _invalid(field, value, "a number from 0 to 1")


def _require_ms(field: str, value: float, least: float) -> None:
    if not _is_number(value) or math.isnan(value) or value < least:
        raise _invalid(field, value, "a number of milliseconds" + (" of at least 0" if least == 0 else ""))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be {wanted}, got {value!r}")
