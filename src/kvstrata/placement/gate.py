"""The live gate: what becomes of each layer's selection before its answer is published.

The frame asks once for every selection, with its estimate, the time that an exact answer takes, and the deadline of the
step. The rule is `kvstrata.cost.prepublication`; here are the settings, the calibration, the clock and the counters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvstrata.contract.budget import EstimatedMass, Fraction, Rows, SelectionBudget, Threshold
from kvstrata.contract.method import AnswerClass
from kvstrata.cost.bounds import require_finite
from kvstrata.cost.prepublication import GateThresholds, Outcome, Phase, PrepublicationState
from kvstrata.cost.prepublication_record import PrepublicationDecision
from kvstrata.cost.service_rates import Direction, ServiceRates
from kvstrata.methods.calibration import Calibration, MassEstimate, budget_key
from kvstrata.ports import Clock, RecomputeCost

__all__ = ["Gate", "GateConfig", "exact_fetch_ms", "exact_recompute_ms", "widened"]


@dataclass(frozen=True, slots=True)
class GateConfig:
    """thresholds: what is accepted. widen_factor: of the budget, at the one wider try; 1 for none. step_ms: from the
    start of a step to its deadline, infinite without one. retries: how often a step may be postponed; 0 for never.
    retry_window_ms: within which it is tried again. approximation_allowed: an answer past the limits may be published
    as degraded. force_exact: every answer must be exact. least_observations: that a measured rate must rest on.

    Errors: `ConfigurationError` for a value that cannot be.
    """

    thresholds: GateThresholds = field(default_factory=GateThresholds)
    widen_factor: float = 2.0
    step_ms: float = math.inf
    retries: int = 0
    retry_window_ms: float = 0.0
    approximation_allowed: bool = False
    force_exact: bool = False
    least_observations: int = 3

    def __post_init__(self) -> None:
        require_finite("GateConfig.widen_factor", self.widen_factor, least=1.0)
        if self.step_ms != math.inf:
            require_finite("GateConfig.step_ms", self.step_ms, above=True)
        require_finite("GateConfig.retries", self.retries)
        require_finite("GateConfig.retry_window_ms", self.retry_window_ms)
        require_finite("GateConfig.least_observations", self.least_observations, least=1)


class Gate:
    """Decides for all layers of the requests of one method. Used by one thread; does not block.

    calibration: `None` for a method without an artefact: then nothing is known of what it leaves out, and each
    selection goes on as uncertain. `Calibration.require` is the caller's to ask, once. clock: of deadlines, in seconds.
    answer: class of the method's answers.

    Attributes:
        counts: how often each outcome was decided.
    """

    def __init__(
        self,
        config: GateConfig,
        calibration: Calibration | None,
        clock: Clock,
        answer: AnswerClass = AnswerClass.APPROXIMATE,
    ) -> None:
        self.config = config
        self.calibration = calibration
        self.counts: Counter[Outcome] = Counter()
        self._clock = clock
        self._answer = answer

    def deadline(self) -> float:
        """The deadline of a step that starts now, by the clock, in seconds."""
        return self._clock() + self.config.step_ms / 1000

    def estimate(self, raw: float | None, budget: SelectionBudget, layer: int) -> MassEstimate:
        """What a selection is believed to leave out. raw: greatest of `Selection.estimate`, `None` without one."""
        if self.calibration is None:
            return MassEstimate.none(raw)
        return self.calibration.estimate(raw, budget_key(budget), layer)

    def can_widen(self, budget: SelectionBudget, layer: int) -> bool:
        """Whether `budget` may be widened, and the estimate under the wider one would be known.

        A wider search of which nothing is known could not be accepted: it is not made.
        """
        if self.config.widen_factor <= 1 or self.calibration is None:
            return False
        return self.calibration.covers(budget_key(widened(budget, self.config.widen_factor)), layer)

    def decide(
        self,
        estimate: MassEstimate,
        phase: Phase,
        fetch_ms: float,
        recompute_ms: float,
        deadline: float,
        *,
        can_widen: bool = True,
        attempt: int = 0,
    ) -> PrepublicationDecision:
        """The decision on one selection.

        fetch_ms, recompute_ms: until an exact answer is there, see `exact_fetch_ms` and `exact_recompute_ms`; infinite
        where there is no such path. deadline: of the step, by the clock. can_widen: a wider budget would bring in more
        rows. attempt: how often the step was postponed already. Errors: `ConfigurationError`, `RetrievalError` as
        `PrepublicationState`.
        """
        config = self.config
        state = PrepublicationState(
            estimate.omitted,
            estimate.confidence,
            phase,
            can_widen and config.widen_factor > 1,
            fetch_ms,
            recompute_ms,
            (deadline - self._clock()) * 1000,
            attempt < config.retries,
            config.retry_window_ms,
            config.approximation_allowed,
            config.force_exact,
            estimate.source,
        )
        decision = PrepublicationDecision.of(state, config.thresholds, self._answer)
        self.counts[decision.outcome] += 1
        return decision


def exact_fetch_ms(
    rates: Callable[[], ServiceRates], reads: dict[str, int], transfers: int = 1, least_observations: int = 3
) -> float:
    """Milliseconds that bring `reads`, bytes by tier, up in `transfers` pieces from each, one tier after the other.

    Rates leave queueing out: under load, bytes that are read before these belong into `reads` too. A tier whose reads
    were not measured often enough counts 0: it is tried, and so gets measured. rates: of the store, e.g.
    `store.rates.rates`.
    """
    known = rates()
    measured = [
        (known.get(tier, Direction.READ, least_observations), nbytes) for tier, nbytes in reads.items() if nbytes
    ]
    return sum(rate.seconds(nbytes, transfers) for rate, nbytes in measured if rate is not None) * 1000


def exact_recompute_ms(
    cost: RecomputeCost | None, tokens: int, least_observations: int = 3, *, start: int = 0
) -> float:
    """Milliseconds that compute rows [start, tokens) again; infinite without an engine that does, or before it was
    timed often enough."""
    if cost is None or cost.observations < least_observations:
        return math.inf
    return cost.seconds(start, tokens) * 1000


def widened(budget: SelectionBudget, factor: float) -> SelectionBudget:
    """The wider budget of the one more try: rows, fraction or cap by `factor`, a threshold's margin too; an estimated
    mass goes to within 1 / factor of what it left out."""
    match budget:
        case Rows():
            return Rows(math.ceil(budget.rows * factor))
        case Fraction():
            return replace(budget, fraction=min(1.0, budget.fraction * factor), least=math.ceil(budget.least * factor))
        case Threshold():
            return replace(budget, margin=budget.margin * factor, cap=math.ceil(budget.cap * factor))
        case EstimatedMass():
            return replace(budget, mass=1 - (1 - budget.mass) / factor, cap=math.ceil(budget.cap * factor))
