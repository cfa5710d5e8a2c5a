"""InfLLM written down row by row, and a model view whose residual stream is the projections themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvstrata.contract.budget import Persistent, SelectionBudget
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.infllm import InfLLM
from kvstrata.methods.infllm_index import InfLLMIndex
from kvstrata.methods.interface import Geometry, StepRows
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.ports import ProjectionWeights


class RotaryView:
    """`ModelView` over hidden states [rows, (query_heads + 2 kv_heads) head_dim] that are queries, keys and values.

    positions: all that were asked for.
    """

    layers = 1

    def __init__(self, query_heads: int, kv_heads: int, head_dim: int) -> None:
        self.query_heads, self.kv_heads, self.head_dim = query_heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.positions: set[int] = set()

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def project(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = normed.unflatten(1, (-1, self.head_dim)).transpose(0, 1)
        query, key, value = heads.split([self.query_heads, self.kv_heads, self.kv_heads])
        return query, key, value

    def rotate(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        self.positions |= set(positions.tolist())
        return rotary(states, positions)

    def projection_weights(self, layer: int) -> ProjectionWeights:
        raise NotImplementedError


def rotary(states: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of base 10000 over halves."""
    half = states.shape[-1] // 2
    angles = torch.outer(positions.float(), 1 / (10000 ** (torch.arange(half) * 2 / (2 * half))))
    angles = torch.cat((angles, angles), dim=-1)
    turned = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states.float() * angles.cos() + turned.float() * angles.sin()).to(states.dtype)


class Conversation:
    """One layer of one history under `method`, step by step. queries, keys, values: before rotary positions."""

    def __init__(
        self,
        method: InfLLM,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        budget: SelectionBudget,
        persistent: Persistent,
    ) -> None:
        self.method, self.budget, self.persistent = method, budget, persistent
        self.raw = queries, keys, values
        positions = torch.arange(keys.shape[1])
        self.queries, self.keys, self.values = rotary(queries, positions), rotary(keys, positions), values
        heads, dim = queries.shape[0], queries.shape[-1]
        self.geometry = Geometry(1, heads, keys.shape[0], dim, dim**-0.5, (None,))
        self.view = RotaryView(heads, keys.shape[0], dim)
        self.index: InfLLMIndex | None = None

    @classmethod
    def random(
        cls,
        method: InfLLM,
        rows: int,
        budget: SelectionBudget,
        persistent: Persistent,
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Conversation:
        make = torch.Generator().manual_seed(seed)
        planes = [torch.randn(count, rows, dim, generator=make).to(dtype) for count in (heads[0], heads[1], heads[1])]
        return cls(method, *planes, budget, persistent)

    def context(self, start: int, stop: int) -> InMemoryContext:
        hidden = torch.cat([plane[:, start:stop] for plane in self.raw]).transpose(0, 1).flatten(1)
        return InMemoryContext(
            self.geometry,
            {0: (self.keys, self.values)},
            self.budget,
            self.persistent,
            stop,
            view=self.view,
            hidden={0: hidden},
        )

    def rows(self, start: int, stop: int) -> StepRows:
        part = slice(start, stop)
        return StepRows(start, self.queries[:, part], self.keys[:, part], self.values[:, part])

    def observe(self, *stops: int) -> InfLLMIndex:
        """Dense steps that end at `stops`."""
        start = 0 if self.index is None else self.index.frontier
        for stop in stops:
            self.index = self.method.observe(self.context(start, stop), 0, self.index, self.rows(start, stop))
            start = stop
        assert self.index is not None
        return self.index

    def append(self, stop: int) -> tuple[Any, StepRows]:
        assert self.index is not None
        start = self.index.frontier
        ctx, rows = self.context(start, stop), self.rows(start, stop)
        self.index = self.method.append(ctx, 0, self.index, rows)
        return ctx, rows

    def step(self, stop: int) -> Selection:
        """Append rows up to `stop` and choose for them."""
        ctx, rows = self.append(stop)
        assert self.index is not None
        return self.method.select(ctx, 0, self.index, rows)

    def attend(self, selection: Selection, start: int, stop: int, *, twice: bool = False) -> Tensor:
        """Attention [query_heads, rows, head_dim], one query after the other, over what each sees.

        twice: rows that leave the recent ones meet every query through the far query, as in the authors' code.
        """
        assert self.index is not None
        sinks, recent = self.persistent.bounds(start + 1)
        chosen = self.method.rows_of(self.index, selection.units)
        turned = selection.repositioned
        group = self.geometry.group
        outputs = []
        for head in range(self.geometry.query_heads):
            owner = head * chosen.shape[0] // self.geometry.query_heads
            named = [row for row in chosen[owner].tolist() if row != NO_UNIT]
            assert len(set(named)) == len(named)
            assert all(sinks <= row < recent for row in named)
            for position in range(start, stop):
                window = max(0, position + 1 - self.persistent.recent)
                local = list(range(window, position + 1))
                leaving = range(recent, max(recent, stop - self.persistent.recent))
                left = [row for row in leaving if twice or row < window]
                far = [*range(sinks), *named, *left]
                values = self.values[head // group].float()[local + far]
                near = self.queries[head, position].float() @ self.keys[head // group].float()[local].T
                if turned is None:
                    distant = self.queries[head, position].float() @ self.keys[head // group].float()[far].T
                else:
                    assert turned.sink_keys is not None
                    owned = head if turned.keys.shape[0] == self.geometry.query_heads else head // group
                    keys = [turned.sink_keys[head // group], turned.keys[owned][chosen[owner] != NO_UNIT]]
                    if left:
                        assert turned.leaving_keys is not None
                        keys.append(turned.leaving_keys[head // group][[row - recent for row in left]])
                    distant = turned.query[head, position - start].float() @ torch.cat(keys).float().T
                weights = torch.softmax(torch.cat((near, distant)) * self.geometry.scale, dim=-1)
                outputs.append(weights @ values)
        return torch.stack(outputs).view(self.geometry.query_heads, stop - start, -1)
