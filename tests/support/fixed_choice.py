"""A method that chooses rows by a fixed rule, and stock attention over the same rows, to compare the frame with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvstrata.contract.budget import Persistent
from kvstrata.contract.method import AnswerClass, GroupSharing, MethodContract, Owner, QueryVariant, Unit, UpdatePhase
from kvstrata.methods.indexless import IndexlessMethod
from kvstrata.methods.interface import Index, MethodContext, StepRows
from kvstrata.methods.selection import NO_UNIT, Selection

__all__ = ["FixedChoice", "stock_choice"]


@dataclass(frozen=True)
class FixedChoice(IndexlessMethod):
    """Every row whose position leaves the remainder of its owner's number by `step`; units are runs of `unit` rows.

    ahead: choose a layer ahead, from the residual stream. bias: added to the scores of odd units.
    """

    contract: ClassVar[MethodContract] = MethodContract(
        name="fixed",
        source="a test",
        version=1,
        answer=AnswerClass.APPROXIMATE,
        unit=Unit.ROW,
        representation="none",
        index="none",
        owner=Owner.KV_HEAD,
        sharing=GroupSharing.MAX,
        update=UpdatePhase.ROW,
        needs_hidden=True,
    )

    step: int = 3
    unit: int = 1
    of: Owner = Owner.KV_HEAD
    ahead: bool = False
    bias: float = 0.0

    @property
    def owner(self) -> Owner:
        return self.of

    def units(self, owner: int, visible: int) -> list[int]:
        count = -(-visible // self.unit)
        return [unit for unit in range(count) if unit % self.step == owner % self.step]

    def select(self, ctx: MethodContext, layer: int, index: Index, rows: StepRows) -> Selection:
        return self._selection(ctx, QueryVariant.ACTUAL)

    def speculate(self, ctx: MethodContext, layer: int, index: Index, hidden: Tensor) -> Selection | None:
        assert hidden.shape[0] == 1
        return self._selection(ctx, QueryVariant.PREDICTED) if self.ahead else None

    def rows_of(self, index: Index, units: Tensor) -> Tensor:
        rows = units.unsqueeze(-1) * self.unit + torch.arange(self.unit)
        late = (units == NO_UNIT).unsqueeze(-1) | (rows >= index.frontier)
        return rows.masked_fill(late, NO_UNIT).flatten(1)

    def unit_span(self, index: Index) -> tuple[int, int, int]:
        return -(-index.frontier // self.unit), 0, index.frontier

    def _selection(self, ctx: MethodContext, variant: QueryVariant) -> Selection:
        owners = ctx.geometry.owners(self.of)
        # A prediction is made before the step's own row is in the index.
        visible = ctx.visible - 1
        lists = [self.units(owner, visible) for owner in range(owners)]
        longest = max(map(len, lists))
        units = torch.tensor([each + [NO_UNIT] * (longest - len(each)) for each in lists])
        each = units.repeat_interleave(ctx.geometry.query_heads // owners, dim=0)
        bias = (each % 2).float() * self.bias if self.bias else None
        return Selection(self.of, units, longest, variant, log_bias=bias)


@contextmanager
def stock_choice(
    model: Any, method: FixedChoice, persistent: Persistent, min_history: int, dense: tuple[int, ...]
) -> Iterator[None]:
    """Inside the block, the stock model's steps of one row attend to what the frame would let in."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers

    def allowed(owner: int, visible: int) -> tuple[Tensor, Tensor]:
        chosen, bias = torch.zeros(visible, dtype=torch.bool), torch.zeros(visible)
        sinks, recent = persistent.bounds(visible)
        for unit in method.units(owner, visible - 1):
            rows = slice(unit * method.unit, min(visible, (unit + 1) * method.unit))
            chosen[rows] = True
            bias[rows] = (unit % 2) * method.bias
        bias[:sinks], bias[recent:] = 0.0, 0.0
        chosen[:sinks], chosen[recent:] = True, True
        return chosen, bias

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * kwargs["scaling"]
        if mask is not None:
            scores = scores + mask[:, :, :, : key.shape[2]]
        layer, visible = module.layer_idx, key.shape[2]
        full = kinds[layer] == "full_attention" and layer not in dense
        if query.shape[2] == 1 and full and visible >= min_history:
            for head in range(query.shape[1]):
                owner = {Owner.QUERY_HEAD: head, Owner.KV_HEAD: head // groups, Owner.LAYER: 0}[method.of]
                seen, bias = allowed(owner, visible)
                scores[:, head] = (scores[:, head] + bias).masked_fill(~seen, -torch.inf)
        sinks = kwargs.get("s_aux")
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = torch.softmax(scores.float(), -1)[..., :visible].to(value.dtype)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    before, name = model.config._attn_implementation, "fixed-choice-reference"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
