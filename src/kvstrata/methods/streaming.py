"""Sinks and a window: the first rows and the newest ones, whatever the query asks for.

The rows of StreamingLLM: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.2;
without its re-numbering of positions. A yardstick: what reads a query should leave out less than this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvstrata.contract.method import AnswerClass, GroupSharing, MethodContract, Owner, Unit, UpdatePhase
from kvstrata.methods.indexless import IndexlessMethod
from kvstrata.methods.interface import Index, MethodContext, StepRows
from kvstrata.methods.selection import Selection

__all__ = ["Streaming"]


@dataclass(frozen=True)
class Streaming(IndexlessMethod):
    """The persistent rows, and the rows before the recent ones as far as the budget goes.

    Sinks and window thus fill the budget however it is divided; nothing is chosen where the persistent rows take all of
    it. A budget by threshold or estimated mass is taken as its cap. Reads nothing and keeps nothing.
    """

    contract: ClassVar[MethodContract] = MethodContract(
        name="streaming",
        source="Xiao et al. 2023, StreamingLLM, section 3.2",
        version=1,
        answer=AnswerClass.APPROXIMATE,
        unit=Unit.ROW,
        representation="none",
        index="none",
        owner=Owner.LAYER,
        sharing=GroupSharing.QUERY_FREE,
        update=UpdatePhase.FIXED,
    )

    def select(self, ctx: MethodContext, layer: int, index: Index, rows: StepRows) -> Selection:
        """The newest rows first, one list for the layer."""
        first, stop = ctx.region
        count = max(0, min(ctx.allowance, stop - first))
        units = torch.arange(stop - 1, stop - 1 - count, -1, device=rows.queries.device).unsqueeze(0)
        return Selection(Owner.LAYER, units, candidates=0)
