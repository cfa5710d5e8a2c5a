"""The gate's decision on one layer's selection, as the frame carries it out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from kvstrata.contract.budget import CapFallback, EstimatedMass, SelectionBudget, Threshold
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.cost.prepublication import Outcome, Phase
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.selection import Selection
from kvstrata.placement.gate import Gate, exact_fetch_ms, exact_recompute_ms
from kvstrata.placement.method_context import FrameContext
from kvstrata.placement.row_access import RowAccess
from kvstrata.placement.selection_log import greatest_estimate
from kvstrata.ports import RecomputeCost
from kvstrata.store.history import History
from kvstrata.store.service_ledger import ServiceLedger

__all__ = ["PostponedError", "RecomputeError", "StepGate", "cap_outcome"]


class PostponedError(Exception):
    """A step is to be tried again; nothing of it was published. retry_ms: within which."""

    def __init__(self, retry_ms: float) -> None:
        super().__init__(f"postponed for {retry_ms:g} ms")
        self.retry_ms = retry_ms


class RecomputeError(Exception):
    """The rows of `history` from `position` on are to be computed again; nothing of the step was published."""

    def __init__(self, history: History, position: int) -> None:
        super().__init__(f"rows from {position} on are to be computed again")
        self.history = history
        self.position = position


class StepGate:
    """Asks a gate about every selection of one sequence. rates, recompute: what exact answers would take.

    A step has one deadline, however often it is tried, and computes rows again at most once. The only sequence of a
    request does so; what it has computed then is exact and is published.
    """

    def __init__(self, gate: Gate, rates: ServiceLedger, recompute: RecomputeCost, access: RowAccess) -> None:
        self.gate = gate
        self._rates = rates
        self._recompute = recompute
        self._access = access
        self._attempt = 0
        self._recomputed = False
        self._deadline: float | None = None

    def begin_step(self) -> None:
        """A step begins, or is tried again."""
        if self._deadline is None:
            self._deadline = self.gate.deadline()

    def end_step(self) -> None:
        """The step was published, or given up."""
        self._attempt, self._recomputed, self._deadline = 0, False, None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Steps in the block are others; after it the step goes on that was begun before, under its deadline."""
        kept = self._attempt, self._recomputed, self._deadline
        self.end_step()
        try:
            yield
        finally:
            self._attempt, self._recomputed, self._deadline = kept

    def decide(self, layer: int, selection: Selection, context: FrameContext, phase: Phase) -> LayerOutcome | None:
        """What becomes of the selection; `None` to select again under a wider budget.

        Errors: `PostponedError`, `RecomputeError`; `RetrievalError` with NO_LEGAL_PATH when nothing may be published.
        """
        gate, access = self.gate, self._access
        least = gate.config.least_observations
        reads = access.missing_bytes(layer)
        if self._recomputed and not reads:
            return LayerOutcome.GATE  # as it was decided
        fetch = exact_fetch_ms(self._rates.rates, reads, max(1, len(access.missing(layer))), least)
        again, position = math.inf, 0
        # Once is enough; it takes the tokens, and beside other sequences it would read their rows.
        if reads and access.alone and access.history.named and not self._recomputed:
            position = access.first_missing * access.chunk_tokens
            again = exact_recompute_ms(self._recompute, access.history.frontier, least, start=position)
        assert self._deadline is not None
        estimate = gate.estimate(greatest_estimate(selection), context.budget, layer)
        wider = phase is Phase.INITIAL and context.limit < context.visible and gate.can_widen(context.budget, layer)
        decision = gate.decide(
            estimate,
            phase,
            fetch,
            again,
            self._deadline,
            can_widen=wider,
            attempt=self._attempt,
        )
        outcome = decision.outcome
        if outcome is Outcome.WIDEN:
            return None
        if outcome is Outcome.RECOMPUTE_EXACT:
            self._recomputed = True
            raise RecomputeError(access.history, position)
        if outcome is Outcome.POSTPONE:
            self._attempt += 1
            raise PostponedError(gate.config.retry_window_ms)
        if outcome is Outcome.REFUSE:
            raise RetrievalError(
                Reason.NO_LEGAL_PATH,
                f"layer {layer}: the estimate of {estimate.omitted:.3g} omitted mass at confidence "
                f"{estimate.confidence:.3g} is past the limits, and no exact path takes less than what is left of the "
                f"deadline (read {fetch:.3g} ms, compute again {again:.3g} ms)",
                "pass a longer step_ms, a larger budget, retries, or approximation_allowed=True",
                field="gate",
            )
        if outcome is Outcome.FULL_EXACT_FETCH:
            return LayerOutcome.GATE
        if outcome is Outcome.DECLARED_DEGRADATION:
            return LayerOutcome.DEGRADED
        return LayerOutcome.WIDENED if phase is Phase.POST_WIDEN else LayerOutcome.SELECTED


def cap_outcome(selection: Selection, budget: SelectionBudget) -> LayerOutcome:
    """What becomes of a selection that wanted more than the cap of `budget`; SELECTED where it did not.

    Errors: `RetrievalError` with SELECTION_CAPPED where the budget says so.
    """
    if not selection.capped or not isinstance(budget, Threshold | EstimatedMass):
        return LayerOutcome.SELECTED
    if budget.on_cap is CapFallback.REFUSE:
        raise RetrievalError(
            Reason.SELECTION_CAPPED,
            f"more than the cap of {budget.cap} rows were wanted under {budget}",
            "pass a higher cap, or on_cap=CapFallback.EXACT or TRUNCATE",
            field="budget.cap",
        )
    return LayerOutcome.CAP if budget.on_cap is CapFallback.EXACT else LayerOutcome.SELECTED
