"""Exact top-k: the rows whose attention weight is highest, found by reading every key.

A yardstick, not a saving: of all choices of as many rows it leaves out the least mass. What a method leaves out is
reported as a multiple of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvstrata.contract.method import AnswerClass, GroupSharing, MethodContract, Owner, Unit, UpdatePhase
from kvstrata.methods.choosing import choose, scores_of, share_scores
from kvstrata.methods.indexless import IndexlessMethod
from kvstrata.methods.interface import Index, MethodContext, StepRows, require_member
from kvstrata.methods.selection import NO_UNIT, Selection

__all__ = ["ExactTopK"]

_READ_ROWS = 8192  # rows that are read at once

_SHARINGS = (GroupSharing.SEPARATE, GroupSharing.SOFTMAX_SUM, GroupSharing.MAX)


@dataclass(frozen=True)
class ExactTopK(IndexlessMethod):
    """The best rows by their true scores.

    sharing: SEPARATE, each query head its own, leaves out the least mass of each head. SOFTMAX_SUM ranks the rows of a
    K/V head by the weights that its query heads give them, added: the least mass that one list for the group can leave
    out. MAX ranks by the highest scaled score in the group. Keeps nothing; every step reads, and is charged for, all
    keys before its own rows.
    """

    contract: ClassVar[MethodContract] = MethodContract(
        name="exact_top_k",
        source="a yardstick: the true scores",
        version=1,
        answer=AnswerClass.APPROXIMATE,
        unit=Unit.ROW,
        representation="the keys",
        index="none",
        owner=Owner.QUERY_HEAD,
        sharing=GroupSharing.SEPARATE,
        update=UpdatePhase.ROW,
    )

    sharing: GroupSharing = GroupSharing.SEPARATE

    def __post_init__(self) -> None:
        require_member("ExactTopK.sharing", self.sharing, _SHARINGS)

    @property
    def owner(self) -> Owner:
        """Query heads, or K/V heads where the group shares its choice."""
        return Owner.QUERY_HEAD if self.sharing is GroupSharing.SEPARATE else Owner.KV_HEAD

    def select(self, ctx: MethodContext, layer: int, index: Index, rows: StepRows) -> Selection:
        """Of several query rows the weights are averaged, and of their scores the highest counts.

        In a step of one row the estimate is the omitted mass itself, to rounding and but for learned sinks.
        """
        first, stop = ctx.region
        logits = _scores(ctx, layer, rows)
        log_weights = torch.log_softmax(logits, dim=-1).logsumexp(1) - math.log(logits.shape[1])
        ranked = logits.amax(1) if self.sharing is GroupSharing.MAX else log_weights
        scores = _shared(ranked[:, first:stop], self.sharing, ctx.geometry.group)
        log_mass = _shared(log_weights[:, first:stop], _mass_sharing(self.sharing), ctx.geometry.group)
        each = torch.ones(1, max(0, stop - first), dtype=torch.int64, device=scores.device)
        chosen = choose(scores, each, ctx.budget, ctx.allowance, log_mass)
        units = torch.where(chosen.units == NO_UNIT, NO_UNIT, chosen.units + first)
        return Selection(
            self.owner,
            units,
            candidates=max(0, stop - first),
            estimate=_omitted(log_weights[:, first:stop], chosen.units),
            capped=chosen.capped,
            scores=scores_of(logits[:, -1], units),
        )


def _scores(ctx: MethodContext, layer: int, rows: StepRows) -> Tensor:
    """Scaled scores fp32 [query_heads, rows, visible], -inf where a row does not see."""
    queries = rows.queries.float()
    heads, count, dim = queries.shape
    grouped = queries.reshape(ctx.geometry.kv_heads, -1, dim)
    parts = [
        grouped @ ctx.keys(layer, start, min(start + _READ_ROWS, rows.start)).float().mT
        for start in range(0, rows.start, _READ_ROWS)
    ]
    scores = torch.cat([*parts, grouped @ rows.keys.float().mT], dim=-1).reshape(heads, count, -1) * ctx.geometry.scale
    own = torch.arange(count, device=queries.device)
    scores[:, :, rows.start :].masked_fill_(own > own.unsqueeze(-1), -torch.inf)
    return scores


def _mass_sharing(sharing: GroupSharing) -> GroupSharing:
    return GroupSharing.SEPARATE if sharing is GroupSharing.SEPARATE else GroupSharing.SOFTMAX_SUM


def _shared(scores: Tensor, sharing: GroupSharing, group: int) -> Tensor:
    if sharing is GroupSharing.SOFTMAX_SUM:
        # Already logarithms of weights, over all rows: a softmax over the region alone would be another one.
        return scores.reshape(scores.shape[0] // group, group, scores.shape[-1]).logsumexp(1)
    return share_scores(scores, sharing, group)


def _omitted(log_weights: Tensor, chosen: Tensor) -> Tensor:
    """Mass of the region's rows, per query head, that were not chosen."""
    taken = torch.zeros(chosen.shape[0], log_weights.shape[1] + 1, dtype=torch.bool, device=chosen.device)
    taken.scatter_(1, chosen % (log_weights.shape[1] + 1), True)  # NO_UNIT falls into the column too many
    taken = taken[:, :-1].repeat_interleave(log_weights.shape[0] // chosen.shape[0], dim=0)
    return log_weights.exp().masked_fill(taken, 0.0).sum(-1).clamp(0, 1)
