"""One owner's selection held against dense attention of one of its query heads: sets, masses, error, bytes.

Made for the worst head of every step that the dense shadow samples, and by the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.method import Unit
from kvstrata.contract.unit_expansion import UnitExpansion
from kvstrata.cost.dense_reference import DenseAnswer, HeadReference
from kvstrata.cost.support_error import Members, SupportError, measure_support, recall
from kvstrata.cost.unit_ledger import ByteLedger, UnitCosts
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.interface import Geometry, Index, Method
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.placement.expansion import Support

__all__ = ["REPORT", "SupportReport", "expansion_of", "report_support", "require_reference"]

_AGAIN = "measure the selection again"


@dataclass(frozen=True, slots=True)
class SupportReport:
    """candidate_recall: share of the top rows among the candidates, `None` unless candidates are rows. support_recall:
    the same among the rows that entered.

    Errors: `RetrievalError` of the first check in `REPORT` that fails.
    """

    expansion: UnitExpansion
    error: SupportError
    ledger: ByteLedger
    candidate_recall: float | None
    support_recall: float

    def __post_init__(self) -> None:
        for check in REPORT:
            check(self)


def candidate_namespace(report: SupportReport) -> None:
    """Only candidates that are rows have a recall of rows."""
    unit = report.expansion.unit
    if report.candidate_recall is not None and unit is not Unit.ROW:
        cause = f"candidate_recall: {report.candidate_recall:g} was given for {unit} candidates, top rows are rows"
        raise RetrievalError(Reason.RECALL_NAMESPACE_MISMATCH, cause, _AGAIN, field="candidate_recall")


REPORT: tuple[Callable[[SupportReport], None], ...] = (candidate_namespace,)


def require_reference(reference: HeadReference, geometry: Geometry, visible: int) -> None:
    """Errors: `RetrievalError` when the reference weighs its scores otherwise than the model, or is of other rows."""
    if reference.scale != geometry.scale:
        cause = f"reference.scale: {reference.scale:g} was used, the model's is {geometry.scale:g}"
        raise RetrievalError(Reason.SCORE_SCALE_MISMATCH, cause, _AGAIN, field="reference.scale")
    found, wanted = (reference.visible, reference.head_dim), (visible, geometry.head_dim)
    if found != wanted:
        cause = f"reference.keys: shape {found} was presented, {wanted} is in force"
        raise RetrievalError(Reason.GEOMETRY_MISMATCH, cause, _AGAIN, field="reference.keys")


def expansion_of(
    method: Method[Any],
    index: Index,
    selection: Selection,
    support: Support,
    *,
    units: int,
    candidates: Sequence[int],
    resident: Collection[int] = (),
    owner: int = 0,
) -> UnitExpansion:
    """The record of one owner's selection. units: how many the index has. candidates: those that were ranked.

    Rows past the index's frontier, the step's own among them, are no part of the history and left out. Errors:
    `RetrievalError` of the first check in `EXPANSION` that fails.
    """
    stop = index.frontier
    rows = method.rows_of(index, selection.units)[owner].tolist()
    persistent = [*range(support.sinks), *range(support.recent, support.visible)]
    entered = persistent + [row for row in support.rows[owner].tolist() if row != NO_UNIT]
    return UnitExpansion(
        method.contract.unit,
        units,
        stop,
        tuple(candidates),
        tuple(unit for unit in selection.units[owner].tolist() if unit != NO_UNIT),
        tuple(dict.fromkeys(row for row in rows if row != NO_UNIT)),
        tuple(row for row in persistent if row < stop),
        tuple(sorted(row for row in entered if row < stop)),
        tuple(resident),
    )


def report_support(
    expansion: UnitExpansion,
    geometry: Geometry,
    reference: HeadReference,
    answer: DenseAnswer,
    costs: UnitCosts,
    output: Sequence[float] | None = None,
    probe_bytes: int = 0,
) -> SupportReport:
    """Measure a selection. answer: what the dense run wrote down, whose top rows are the measure of recall. output:
    [head_dim] that the method gave; exact attention over its support unless given.

    Errors: `RetrievalError` when reference, answer or costs do not fit each other.
    """
    require_reference(reference, geometry, expansion.visible)
    answer.require(reference)
    top = Members(Unit.ROW, answer.top_rows)
    ranked = Members(expansion.unit, expansion.candidates)
    return SupportReport(
        expansion,
        measure_support(reference, expansion.support, output, answer.value_bound),
        ByteLedger.of(expansion, costs, probe_bytes),
        recall(ranked, top) if ranked.unit is top.unit else None,
        recall(Members(Unit.ROW, expansion.support), top),
    )
