"""From chosen units to the rows of one attention: expanded, without duplicates, checked, persistent rows beside them.

R = dedup(E(U) + P), a set: a row that a unit and the persistent rows both name enters the softmax once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvstrata.contract.budget import Persistent
from kvstrata.contract.method import Owner
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.interface import Geometry, Index, Method
from kvstrata.methods.selection import NO_UNIT, Selection

__all__ = ["Support", "expand"]


@dataclass(frozen=True, eq=False)
class Support:
    """The rows that enter attention for each owner.

    owner: whose. rows: int64 [owners, n], chosen rows beside the persistent ones, filled up with `NO_UNIT`. columns:
    int64 [owners, n], the column of `Selection.units` that brought each row in, the best one if several did. order:
    its place in what `rows_of` named. sinks, recent: persistent rows are [0, sinks) and [recent, visible). log_bias:
    fp32 [query_heads, n] or `None`. named: rows that the units name, over all owners. duplicates: those of them that
    were named before, or are persistent.
    """

    owner: Owner
    rows: Tensor
    columns: Tensor
    order: Tensor
    sinks: int
    recent: int
    visible: int
    log_bias: Tensor | None
    named: int
    duplicates: int

    @property
    def counts(self) -> Tensor:
        """Rows that enter attention, persistent ones included, int64 [owners]."""
        return (self.rows != NO_UNIT).sum(-1) + self.sinks + self.visible - self.recent

    def without_chosen(self) -> Support:
        """The persistent rows alone."""
        empty = self.rows[:, :0]
        return replace(self, rows=empty, columns=empty, order=empty, log_bias=None)


def expand(
    method: Method[Any],
    index: Index,
    selection: Selection,
    geometry: Geometry,
    persistent: Persistent,
    visible: int,
    first: int | None = None,
) -> Support:
    """The rows of `selection` among `visible` rows. first: rows that the step's first row sees; `visible` in a step of
    one row. The recent rows are those of the first row, and all after them.

    Errors: `RetrievalError` with GQA_OWNERSHIP_MISMATCH for lists of another number of owners, DUPLICATE_CANDIDATE for
    a unit that is named twice, CANDIDATE_BEYOND_FRONTIER for rows that are not there, CANDIDATE_IDS_NOT_ROWS for lists
    of rows that do not fit those of the units, GEOMETRY_MISMATCH for a bias of another shape or that is not finite.
    """
    units = selection.units
    if units.dim() != 2 or units.shape[0] != geometry.owners(selection.owner):
        raise _refused(
            Reason.GQA_OWNERSHIP_MISMATCH,
            f"units of shape {tuple(units.shape)} for {geometry.owners(selection.owner)} owners ({selection.owner})",
            "selection.units",
        )
    _check_unique(units)
    sinks, recent = persistent.bounds(visible if first is None else first)
    rows = method.rows_of(index, units)
    columns = _columns(rows, units)
    rows = rows.masked_fill(units.gather(-1, columns) == NO_UNIT, NO_UNIT)
    if rows.numel() and (int(rows.max()) >= visible or int(rows.min()) < NO_UNIT):
        raise _refused(
            Reason.CANDIDATE_BEYOND_FRONTIER,
            f"rows from {int(rows.min())} to {int(rows.max())} were chosen of {visible}",
            "selection.rows",
        )
    named = int((rows != NO_UNIT).sum())
    rows = rows.masked_fill((rows < sinks) | (rows >= recent), NO_UNIT)
    rows, order = torch.sort(rows, dim=-1, stable=True)
    repeated = torch.zeros_like(rows, dtype=torch.bool)
    repeated[:, 1:] = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] != NO_UNIT)
    rows = rows.masked_fill(repeated, NO_UNIT)
    kept = rows != NO_UNIT
    # Entries that are no row come first after the sort; the longest list decides what is kept.
    longest = int(kept.sum(-1).max()) if kept.numel() else 0
    if bool(repeated.any()):
        keep_order = torch.sort(kept.long(), dim=-1, stable=True).indices
        rows, order = rows.gather(-1, keep_order), order.gather(-1, keep_order)
    rows, order = rows[:, rows.shape[1] - longest :], order[:, order.shape[1] - longest :]
    columns = columns.gather(-1, order)
    return Support(
        selection.owner,
        rows,
        columns,
        order,
        sinks,
        recent,
        visible,
        _bias(selection, geometry, columns, rows),
        named,
        named - int((rows != NO_UNIT).sum()),
    )


def _columns(rows: Tensor, units: Tensor) -> Tensor:
    """The column of `units` that each entry of `rows` belongs to, [owners, entries]."""
    owners, count = units.shape
    if rows.dim() != 2 or rows.shape[0] != owners or (rows.shape[1] % count if count else rows.shape[1]):
        raise _refused(
            Reason.CANDIDATE_IDS_NOT_ROWS,
            f"rows of shape {tuple(rows.shape)} for units of shape {tuple(units.shape)}",
            "selection.rows",
        )
    width = rows.shape[1] // count if count else 1
    return (torch.arange(rows.shape[1], device=rows.device) // max(1, width)).expand(owners, -1)


def _bias(selection: Selection, geometry: Geometry, columns: Tensor, rows: Tensor) -> Tensor | None:
    bias = selection.log_bias
    if bias is None:
        return None
    if bias.shape != (geometry.query_heads, selection.units.shape[1]):
        raise _refused(
            Reason.GEOMETRY_MISMATCH,
            f"a log-bias of shape {tuple(bias.shape)} for {geometry.query_heads} heads and "
            f"{selection.units.shape[1]} units",
            "selection.log_bias",
        )
    each = columns.repeat_interleave(geometry.query_heads // columns.shape[0], dim=0)
    chosen = bias.float().gather(-1, each)
    filled = (rows == NO_UNIT).repeat_interleave(geometry.query_heads // rows.shape[0], dim=0)
    chosen = chosen.masked_fill(filled, 0.0)
    if not bool(torch.isfinite(chosen).all()):
        raise _refused(Reason.GEOMETRY_MISMATCH, "a log-bias is not finite", "selection.log_bias")
    return chosen


def _check_unique(units: Tensor) -> None:
    ordered = torch.sort(units, dim=-1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_UNIT)).any()):
        raise _refused(Reason.DUPLICATE_CANDIDATE, "a unit was chosen twice for one owner", "selection.units")


def _refused(reason: Reason, cause: str, field: str) -> RetrievalError:
    return RetrievalError(reason, cause, "this is a defect of the method; report it", field=field)
