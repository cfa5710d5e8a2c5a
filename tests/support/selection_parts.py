"""Shared pieces of the methods' tests: random rows of a layer, a context over them, attention over a selection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstrata.contract.budget import Persistent, Rows, SelectionBudget
from kvstrata.contract.method import Owner
from kvstrata.kernels.selected import selected_state
from kvstrata.kernels.state import PartialState
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.interface import Geometry, Index, Method, StepRows
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.placement.expansion import Support, expand

GOLDEN = Path(__file__).parents[1] / "golden" / "methods"


def golden(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays of a golden instance as tensors, and what is written beside them."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        tensors = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    return tensors, json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


class Layer:
    """Rows of one layer: q [query_heads, tokens, d], k and v [kv_heads, tokens, d]; layer number 0."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.q, self.k, self.v = q, k, v
        dim = k.shape[-1]
        self.geometry = Geometry(1, q.shape[0], k.shape[0], dim, dim**-0.5, (None,))

    @classmethod
    def random(
        cls,
        tokens: int,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 8,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        spread: float = 2.0,
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(heads, tokens, head_dim, generator=generator).to(dtype)
            for heads in (kv_heads * group, kv_heads, kv_heads)
        )
        return cls(q * spread, k, v)

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])

    def context(
        self,
        budget: SelectionBudget | int,
        visible: int | None = None,
        sinks: int = 0,
        recent: int = 1,
        seed: int = 0,
    ) -> InMemoryContext:
        return InMemoryContext(
            self.geometry,
            {0: (self.k, self.v)},
            Rows(budget) if isinstance(budget, int) else budget,
            Persistent(sinks, recent),
            self.tokens if visible is None else visible,
            seed=seed,
        )

    def step(self, start: int, stop: int) -> StepRows:
        return StepRows(start, self.q[:, start:stop], self.k[:, start:stop], self.v[:, start:stop])

    def last_step(self, rows: int = 1) -> StepRows:
        return self.step(self.tokens - rows, self.tokens)

    def dense(self, step: StepRows) -> Tensor:
        """Causal attention of the step's rows over all rows, in float64: weights [query_heads, rows, tokens]."""
        keys = self.k.double().repeat_interleave(self.geometry.group, 0)
        scores = step.queries.double() @ keys.mT * self.geometry.scale
        seen = torch.arange(self.tokens) <= torch.arange(step.start, step.stop).unsqueeze(-1)
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)

    def dense_output(self, step: StepRows) -> Tensor:
        """[query_heads, rows, d] in float64."""
        return self.dense(step) @ self.v.double().repeat_interleave(self.geometry.group, 0)


def choose_last(method: Method[Any], ctx: InMemoryContext, layer: Layer, rows: int = 1) -> tuple[Any, Selection]:
    """Build over everything, then select for the last `rows` rows."""
    index = method.build(ctx, 0, None)
    return index, method.select(ctx, 0, index, layer.last_step(rows))


def support_of(method: Method[Any], index: Index, selection: Selection, ctx: InMemoryContext) -> Support:
    return expand(method, index, selection, ctx.geometry, ctx.persistent, ctx.visible)


def support_mask(support: Support, geometry: Geometry) -> Tensor:
    """bool [query_heads, visible]: rows that enter attention."""
    mask = torch.zeros(support.rows.shape[0], support.visible + 1, dtype=torch.bool)
    mask.scatter_(1, support.rows % (support.visible + 1), True)
    mask = mask[:, :-1]
    mask[:, : support.sinks] = True
    mask[:, support.recent :] = True
    return mask.repeat_interleave(geometry.query_heads // mask.shape[0], 0)


def attend(layer: Layer, support: Support, step: StepRows) -> Tensor:
    """Output [query_heads, rows, d] over the support: chosen rows and persistent rows apart, then merged."""
    geometry = layer.geometry
    rows = support.rows
    if support.owner is Owner.LAYER:
        rows = rows.expand(geometry.kv_heads, -1)
    per = rows.shape[0] // geometry.kv_heads
    heads = torch.arange(rows.shape[0]) // per
    keys, values = (plane[heads.unsqueeze(-1), rows.clamp_min(0)] for plane in (layer.k, layer.v))
    positions = torch.arange(step.start, step.stop)
    seen = (rows != NO_UNIT).unsqueeze(1) & (rows.unsqueeze(1) <= positions.view(1, -1, 1))
    chosen = selected_state(step.queries, keys, values, geometry.scale, seen, support.log_bias)
    kept = torch.cat([torch.arange(support.sinks), torch.arange(support.recent, support.visible)])
    persistent = selected_state(
        step.queries,
        layer.k[:, kept],
        layer.v[:, kept],
        geometry.scale,
        (kept <= positions.unsqueeze(-1)).unsqueeze(0),
    )
    state: PartialState = chosen.merge(persistent)
    return state.output()
