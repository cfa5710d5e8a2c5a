"""One owner's way from candidates to rows, as a record: five sets in two namespaces, none of which stands for another.

    candidates (units) -> selected (units) -> expanded rows E(U) -> support R = dedup(E(U) + P), a part of S

S are the legal rows [0, visible) of the history, P the persistent ones. Checks run in order when a record is made, also
by `dataclasses.replace`; the first that fails gives the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.contract.method import Unit
from kvstrata.errors import Reason, RetrievalError

__all__ = ["EXPANSION", "UnitExpansion"]

_REPORT = "this is a defect of the method or of the caller; report it"


@dataclass(frozen=True, slots=True)
class UnitExpansion:
    """unit: the namespace of `candidates` and `selected`. units: how many the index has. visible: rows of S.

    candidates, selected: units, best first. expanded: rows of the selected units, within S. persistent, support,
    resident: rows; resident ones need no transfer.

    Errors: `RetrievalError` of the first check in `EXPANSION` that fails.
    """

    unit: Unit
    units: int
    visible: int
    candidates: tuple[int, ...]
    selected: tuple[int, ...]
    expanded: tuple[int, ...]
    persistent: tuple[int, ...]
    support: tuple[int, ...]
    resident: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for check in EXPANSION:
            check(self)

    @property
    def ratio(self) -> float:
        """Rows for each selected unit, 0 without units. It says nothing about waste."""
        return len(self.expanded) / len(self.selected) if self.selected else 0.0

    @property
    def transferred(self) -> tuple[int, ...]:
        """Rows of the support that are not resident."""
        resident = frozenset(self.resident)
        return tuple(row for row in self.support if row not in resident)


def candidates_indexed(record: UnitExpansion) -> None:
    """Every candidate is a unit of the index."""
    foreign = [unit for unit in record.candidates if not 0 <= unit < record.units]
    if foreign:
        cause = f"{foreign} are none of {record.units} {record.unit} units"
        raise _refused(Reason.CANDIDATE_NOT_INDEXED, "expansion.candidates", cause)


def candidates_distinct(record: UnitExpansion) -> None:
    """No candidate is named twice."""
    twice = [unit for unit, count in Counter(record.candidates).items() if count > 1]
    if twice:
        raise _refused(Reason.DUPLICATE_CANDIDATE, "expansion.candidates", f"{twice} are named twice")


def selected_are_candidates(record: UnitExpansion) -> None:
    """What was selected was a candidate."""
    strange = sorted(set(record.selected) - set(record.candidates))
    if strange:
        raise _refused(Reason.SELECTED_NOT_CANDIDATE, "expansion.selected", f"{strange} were no candidates")


def persistent_in_history(record: UnitExpansion) -> None:
    """Persistent rows are rows of the history."""
    _require_rows("expansion.persistent", record.persistent, record.visible)


def resident_in_history(record: UnitExpansion) -> None:
    """Resident rows are rows of the history."""
    _require_rows("expansion.resident", record.resident, record.visible)


def support_distinct(record: UnitExpansion) -> None:
    """Each row enters the softmax once: a row that counts twice has another denominator."""
    twice = [row for row, count in Counter(record.support).items() if count > 1]
    if twice:
        raise _refused(Reason.SUPPORT_NOT_DEDUPLICATED, "expansion.support", f"rows {twice} enter twice")


def support_follows(record: UnitExpansion) -> None:
    """The support is what the selected units and the persistent rows name, no more and no less."""
    wanted, found = set(record.expanded) | set(record.persistent), set(record.support)
    if found != wanted:
        cause = f"rows {sorted(wanted - found)} are missing, rows {sorted(found - wanted)} were not named"
        raise _refused(Reason.UNIT_EXPANSION_MISMATCH, "expansion.support", cause)


def support_in_history(record: UnitExpansion) -> None:
    """All of it are rows of the history."""
    _require_rows("expansion.support", record.support, record.visible)


EXPANSION: tuple[Callable[[UnitExpansion], None], ...] = (
    candidates_indexed,
    candidates_distinct,
    selected_are_candidates,
    persistent_in_history,
    resident_in_history,
    support_distinct,
    support_follows,
    support_in_history,
)


def _require_rows(field: str, rows: tuple[int, ...], visible: int) -> None:
    outside = [row for row in rows if not 0 <= row < visible]
    if outside:
        raise _refused(Reason.ROW_OUT_OF_SUPPORT, field, f"{outside} are none of the {visible} legal rows")


def _refused(reason: Reason, field: str, cause: str) -> RetrievalError:
    return RetrievalError(reason, f"{field}: {cause}", _REPORT, field=field)
