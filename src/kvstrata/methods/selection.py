"""What a method hands to the frame: the units that it chose, and how they are to be weighed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.contract.method import Owner, QueryVariant

__all__ = ["NO_UNIT", "Correction", "Repositioned", "Selection"]

NO_UNIT = -1
"""Fills up the lists of owners that chose fewer units, or whose units hold fewer rows, than the longest."""


@dataclass(frozen=True, eq=False)
class Repositioned:
    """Queries and keys turned to other positions, used for the chosen rows in place of the actual ones.

    query: [query_heads, rows, head_dim] of the step's rows. keys: [kv_heads, n, head_dim] of the rows that `rows_of`
    names for the chosen units, in that order; [query_heads, n, head_dim] where the selections are those of query heads.
    sink_keys: [kv_heads, sinks, head_dim] of the sinks that the step's first row has, which then meet `query` as well;
    `None` leaves them to the actual query and keys. leaving_keys: [kv_heads, m, head_dim] of the m rows from the first
    recent row of the step's first query on, which leave the recent rows while the step goes on: queries that have them
    no more among their recent rows may meet them through `query`; `None` where there are none, or nobody may.
    """

    query: Tensor
    keys: Tensor
    sink_keys: Tensor | None = None
    leaving_keys: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Correction:
    """What stands for the rows left out: the output becomes share * output + (1 - share) * value.

    share: [query_heads], the mass that the chosen rows are believed to hold. value: [kv_heads, head_dim].
    """

    share: Tensor
    value: Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """The units that a method chose for one layer of one sequence.

    owner: whose they are; [owners] is [query_heads], [kv_heads] or [1]. units: int64 [owners, n], best first, each at
    most once, filled up with `NO_UNIT`. candidates: units that were scored for each owner. variant: the query that
    chose them. log_bias: fp32 [query_heads, n], added to the scaled scores of all rows of the unit in the same column,
    or `None`. estimate: fp32 [query_heads], the share of the attention mass that the method itself believes to leave
    out, or `None` where it has no opinion. capped: whether some owner wanted more than the cap allows. scores: fp32
    [query_heads, n], what the index makes of the scaled score of the best row of each chosen unit, or `None` where it
    ranks by something else; scores_are_bounds: none of these rows scores higher.
    """

    owner: Owner
    units: Tensor
    candidates: int
    variant: QueryVariant = QueryVariant.ACTUAL
    log_bias: Tensor | None = None
    estimate: Tensor | None = None
    capped: bool = False
    repositioned: Repositioned | None = None
    correction: Correction | None = None
    scores: Tensor | None = None
    scores_are_bounds: bool = False

    @classmethod
    def none(cls, owner: Owner, owners: int, device: torch.device | str = "cpu") -> Selection:
        """No unit for any owner."""
        return cls(owner, torch.full((owners, 0), NO_UNIT, dtype=torch.int64, device=device), 0)
