"""Methods whose units and ranking are given: rows, pages and clusters of the topic's fixture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvstrata.contract.method import AnswerClass, GroupSharing, MethodContract, Owner, Unit, UpdatePhase
from kvstrata.methods.interface import Index, Method, MethodContext, StepRows
from kvstrata.methods.selection import NO_UNIT, Selection

__all__ = ["METHODS", "GivenUnits", "MembersIndex"]


class MembersIndex(Index):
    """members: int64 [units, most rows], filled up with `NO_UNIT`."""

    def __init__(self, members: list[list[int]], frontier: int) -> None:
        width = max(map(len, members))
        self.members = torch.tensor([rows + [NO_UNIT] * (width - len(rows)) for rows in members])
        self.frontier = frontier


@dataclass(frozen=True)
class GivenUnits(Method[MembersIndex]):
    """Units whose members and ranking are given."""

    contract: ClassVar[MethodContract] = MethodContract(
        "given-units",
        "conformance fixture",
        1,
        AnswerClass.APPROXIMATE,
        Unit.ROW,
        "none",
        "list of members",
        Owner.KV_HEAD,
        GroupSharing.SUM,
        UpdatePhase.FIXED,
    )
    members: tuple[tuple[int, ...], ...]
    selected: tuple[int, ...]
    candidates: int

    def build(self, ctx: MethodContext, layer: int, index: MembersIndex | None) -> MembersIndex:
        """The members as given, over all rows but the step's own."""
        return MembersIndex([list(rows) for rows in self.members], ctx.visible - 1)

    def append(self, ctx: MethodContext, layer: int, index: MembersIndex, rows: StepRows) -> MembersIndex:
        """The index stays."""
        return index

    def select(self, ctx: MethodContext, layer: int, index: MembersIndex, rows: StepRows) -> Selection:
        """The units as given."""
        return Selection(Owner.KV_HEAD, torch.tensor([list(self.selected)]), self.candidates)

    def rows_of(self, index: MembersIndex, units: Tensor) -> Tensor:
        """Members of `units`."""
        rows = index.members[units.clamp_min(0)].masked_fill((units == NO_UNIT).unsqueeze(-1), NO_UNIT)
        return rows.flatten(1)


class _Pages(GivenUnits):
    contract = replace(GivenUnits.contract, unit=Unit.PAGE)


class _Clusters(GivenUnits):
    contract = replace(GivenUnits.contract, unit=Unit.CLUSTER)


METHODS: dict[str, type[GivenUnits]] = {"row": GivenUnits, "page": _Pages, "cluster": _Clusters}
"""Method of each unit."""
