"""The softmax weights by which the code of InfLLM's authors finds representatives: attention again, for evidence."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.methods.infllm_index import InfLLMIndex
from kvstrata.methods.influence import following_weights
from kvstrata.methods.interface import MethodContext, StepRows
from kvstrata.methods.selection import NO_UNIT

__all__ = ["weigh_all", "weigh_chosen"]


def weigh_all(ctx: MethodContext, layer: int, index: InfLLMIndex, rows: StepRows) -> None:
    """Evidence of a step that attended to everything. Reads all keys."""
    keys = torch.cat((ctx.keys(layer, 0, rows.start), rows.keys), dim=1)
    position = torch.arange(rows.start, rows.stop, device=keys.device).unsqueeze(1)
    other = torch.arange(rows.stop, device=keys.device)
    before = other <= position - index.local
    near = (other <= position) & ~before
    weights = following_weights(rows.queries, keys, near, rows.queries, keys, before, ctx.geometry.scale)
    index.weigh(weights, 0, rows.stop)


def weigh_chosen(
    ctx: MethodContext,
    layer: int,
    index: InfLLMIndex,
    rows: StepRows,
    far_queries: Tensor,
    chosen: Tensor,
    far: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Evidence of a step that selected, as the authors' code weighs. Reads the recent keys.

    chosen: int64 [owners, n], rows. far: keys [heads, m, head_dim] of the sinks, of `chosen`, and of the rows that
    leave the recent ones while the step goes on. The code lets every query meet the last kind in both places.
    """
    start = max(0, rows.start + 1 - index.local)
    keys = torch.cat((ctx.keys(layer, start, rows.start), rows.keys), dim=1)
    position = torch.arange(rows.start, rows.stop, device=keys.device).unsqueeze(1)
    other = torch.arange(start, rows.stop, device=keys.device)
    near = (other <= position) & (other > position - index.local)
    owners = far[1].shape[0]
    far_keys = torch.cat([part.repeat_interleave(owners // part.shape[0], dim=0) for part in far], dim=1)
    seen = torch.ones(owners, far_keys.shape[1], dtype=torch.bool, device=keys.device)
    sinks = far[0].shape[1]
    seen[:, sinks : sinks + chosen.shape[1]] = chosen != NO_UNIT
    scale = ctx.geometry.scale
    weights = following_weights(rows.queries, keys, near, far_queries, far_keys, seen.unsqueeze(1), scale)
    index.weigh(weights, start, rows.stop)
