"""Rows drawn at random: the yardstick below which a method knows nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvstrata.contract.method import AnswerClass, GroupSharing, MethodContract, Owner, Unit, UpdatePhase
from kvstrata.methods.indexless import IndexlessMethod
from kvstrata.methods.interface import Index, MethodContext, StepRows, require_at_least
from kvstrata.methods.selection import Selection

__all__ = ["RandomRows"]


@dataclass(frozen=True)
class RandomRows(IndexlessMethod):
    """Rows drawn uniformly and without replacement, for each K/V head and step anew.

    seed: changes the draws; they depend on it, the frame's own seed, the layer and the position of the step, and on
    nothing else. A budget by threshold or estimated mass is taken as its cap. Reads nothing and keeps nothing.
    """

    contract: ClassVar[MethodContract] = MethodContract(
        name="random_rows",
        source="a yardstick of our own",
        version=1,
        answer=AnswerClass.APPROXIMATE,
        unit=Unit.ROW,
        representation="none",
        index="none",
        owner=Owner.KV_HEAD,
        sharing=GroupSharing.QUERY_FREE,
        update=UpdatePhase.FIXED,
    )

    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least("RandomRows.seed", self.seed, 0)

    def select(self, ctx: MethodContext, layer: int, index: Index, rows: StepRows) -> Selection:
        """Rows of the region in the order of random keys, so that a smaller budget draws a part of the same rows."""
        first, stop = ctx.region
        region = max(0, stop - first)
        generator = ctx.generator(layer, f"random rows/{self.seed}/{rows.start}")
        keys = torch.rand(ctx.geometry.kv_heads, region, generator=generator)
        order = torch.sort(keys, dim=-1, stable=True).indices
        units = first + order[:, : min(ctx.allowance, region)]
        return Selection(Owner.KV_HEAD, units.to(rows.queries.device), candidates=region)
