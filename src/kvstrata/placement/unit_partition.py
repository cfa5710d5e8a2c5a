"""Every row of an index belongs to exactly one of its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.interface import Index, Method
from kvstrata.methods.selection import NO_UNIT

__all__ = ["PARTITION", "UnitPartition", "require_partition", "unit_members"]


@dataclass(frozen=True, slots=True)
class UnitPartition:
    """members: rows of each unit. start, stop: the rows [start, stop) that the units are to cover."""

    members: tuple[tuple[int, ...], ...]
    start: int
    stop: int


def unit_members(
    method: Method[Any], index: Index, units: int, owners: int = 1
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows of the units [0, units) of each owner, from the method's `rows_of`. Grows with the rows."""
    named = torch.arange(units).expand(owners, -1)
    rows = method.rows_of(index, named).view(owners, units, -1)
    return tuple(tuple(tuple(int(row) for row in unit if row != NO_UNIT) for unit in owner) for owner in rows.tolist())


def require_partition(
    method: Method[Any], index: Index, units: int, *, owners: int = 1, start: int = 0, stop: int | None = None
) -> None:
    """Errors: `RetrievalError` of the first check in `PARTITION` that fails, unless the units [0, units) of every owner
    cover each row of [start, stop) once. stop: the index's frontier unless given. Grows with the rows."""
    stop = index.frontier if stop is None else stop
    for members in unit_members(method, index, units, owners):
        for check in PARTITION:
            check(UnitPartition(members, start, stop))


def rows_indexed(partition: UnitPartition) -> None:
    """Units hold rows of the index only."""
    for unit, rows in enumerate(partition.members):
        outside = [row for row in rows if not partition.start <= row < partition.stop]
        if outside:
            cause = f"unit {unit} holds rows {outside} outside [{partition.start}, {partition.stop})"
            raise _refused(Reason.UNIT_PARTITION_INVALID, cause)


def no_overlap(partition: UnitPartition) -> None:
    """No row is in two units, nor in one twice."""
    twice = [row for row, count in Counter(row for rows in partition.members for row in rows).items() if count > 1]
    if twice:
        raise _refused(Reason.UNIT_OVERLAP, f"rows {twice} are in several units")


def no_gap(partition: UnitPartition) -> None:
    """No row is in none."""
    held = {row for rows in partition.members for row in rows}
    missing = [row for row in range(partition.start, partition.stop) if row not in held]
    if missing:
        raise _refused(Reason.UNIT_COVERAGE_GAP, f"rows {missing} are in no unit")


PARTITION: tuple[Callable[[UnitPartition], None], ...] = (rows_indexed, no_overlap, no_gap)


def _refused(reason: Reason, cause: str) -> RetrievalError:
    return RetrievalError(
        reason, f"index.units: {cause}", "build the index again; report it if it happens twice", field="index.units"
    )
