"""Attention over a support: persistent rows where they lie, chosen rows gathered or near their data, merged exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.kernels.block_table import BlockTable
from kvstrata.kernels.decode import DecodeAttention
from kvstrata.kernels.gathered import SlotMemory, gather_chosen
from kvstrata.kernels.paged import torch_dtype
from kvstrata.kernels.selected import selected_state, selected_weights
from kvstrata.kernels.state import PartialState
from kvstrata.methods.interface import Geometry, StepRows
from kvstrata.methods.selection import NO_UNIT, Repositioned
from kvstrata.placement.expansion import Support

__all__ = ["ChosenRows", "SupportAttention"]


@dataclass(frozen=True, eq=False)
class ChosenRows:
    """The chosen rows of one support, in memory: keys and values [owners, n, head_dim], visible bool [owners, n]."""

    keys: Tensor
    values: Tensor
    visible: Tensor


class SupportAttention:
    """Rows and attention of one layer shape. memory: the device arena's slots in one tensor."""

    def __init__(self, kernel: DecodeAttention, geometry: Geometry, memory: Callable[[], Tensor], stride: int) -> None:
        self.kernel = kernel
        self.geometry = geometry
        self.layout: SegmentLayout = kernel.layout
        self._memory = memory
        self._stride = stride

    def heads(self, owners: int, device: torch.device) -> Tensor:
        """The K/V head of every owner, int64 [owners]."""
        each = max(1, owners // self.geometry.kv_heads)
        return torch.arange(owners, device=device) // each

    def rows(self, support: Support) -> Tensor:
        """Chosen rows [owners, n], those of a whole layer repeated for every K/V head."""
        if support.rows.shape[0] == 1 and self.geometry.kv_heads > 1:
            return support.rows.expand(self.geometry.kv_heads, -1)
        return support.rows

    def gather(self, table: BlockTable, slots: Tensor, rows: Tensor, where: Tensor | None = None) -> ChosenRows:
        """Chosen rows from the device's arena. where: bool [owners, n], those that are there; all unless given."""
        visible = rows != NO_UNIT
        if where is not None:
            visible = visible & where
        heads = self.heads(rows.shape[0], rows.device)
        memory = SlotMemory(self._memory(), self._stride, self.layout)
        if memory.usable:
            keys, values = memory.gather(slots, rows.masked_fill(~visible, 0), heads)
        else:
            wanted = rows.masked_fill(~visible, NO_UNIT)
            keys, values = gather_chosen(lambda chunk: table.segments[chunk], self.layout, wanted, heads)
        return ChosenRows(keys, values, visible)

    def gather_near(self, segments: dict[int, Tensor], rows: Tensor) -> ChosenRows:
        """Chosen rows of the chunks in `segments`, where they lie."""
        chunks = rows.div(self.layout.chunk_tokens, rounding_mode="floor")
        there = torch.tensor(sorted(segments), device=rows.device)
        visible = (rows != NO_UNIT) & torch.isin(chunks, there)
        heads = self.heads(rows.shape[0], rows.device)
        wanted = rows.masked_fill(~visible, NO_UNIT)
        keys, values = gather_chosen(segments.__getitem__, self.layout, wanted, heads)
        return ChosenRows(keys, values, visible)

    def chosen_state(
        self, rows: StepRows, chosen: ChosenRows, support: Support, turned: Repositioned | None
    ) -> PartialState:
        """State [query_heads, rows] over gathered rows."""
        query, keys = self._turned(rows, chosen, support, turned)
        return selected_state(
            query, keys, chosen.values, self.geometry.scale, chosen.visible.unsqueeze(1), support.log_bias
        )

    def _turned(
        self, rows: StepRows, chosen: ChosenRows, support: Support, turned: Repositioned | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys by which gathered rows are weighed."""
        if turned is None:
            return rows.queries, chosen.keys
        order = support.order
        if order.shape[0] == 1:
            order = order.expand(chosen.keys.shape[0], -1)
        each = turned.keys
        if each.shape[0] != order.shape[0]:
            each = each[self.heads(order.shape[0], order.device)]
        return turned.query, each.gather(1, order.unsqueeze(-1).expand(-1, -1, each.shape[-1]))

    def persistent_state(
        self, rows: StepRows, table: BlockTable, support: Support, recent: int, turned: Repositioned | None
    ) -> PartialState:
        """State [query_heads, rows] over the persistent rows: sinks, the recent rows of the step's first row, and all
        after them. Where positions are moved each row has its own last `recent` rows, and the others at their edge."""
        count, scale = rows.queries.shape[1], self.geometry.scale
        moved = turned is not None and turned.sink_keys is not None
        if count == 1 and not moved:
            query = rows.queries.unsqueeze(0)
            state = self.kernel.partial(query, table, support.recent, support.visible, scale=scale)
            if support.sinks:
                state = state.merge(self.kernel.partial(query, table, 0, support.sinks, scale=scale))
            return PartialState(state.m.unsqueeze(1), state.l.unsqueeze(1), state.u.unsqueeze(1))
        keys, values = self.read(table, support.recent, support.visible)
        device = rows.queries.device
        position = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
        other = torch.arange(support.recent, support.visible, device=device).unsqueeze(0)
        seen = other <= position
        if turned is not None:
            seen = seen & (other > position - recent)
        state = selected_state(rows.queries, keys, values, scale, seen.unsqueeze(0))
        if turned is not None and turned.leaving_keys is not None:
            # What leaves the window within the step is met from its edge by the queries that come after.
            left = turned.leaving_keys.shape[1]
            gone = (other[:, :left] <= position - recent).unsqueeze(0)
            state = state.merge(selected_state(turned.query, turned.leaving_keys, values[:, :left], scale, gone))
        if not support.sinks:
            return state
        sink_keys, sink_values = self.read(table, 0, support.sinks)
        if turned is not None and turned.sink_keys is not None:
            return state.merge(selected_state(turned.query, turned.sink_keys, sink_values, scale))
        # A row near the start of the history meets the sinks in its window as well.
        apart = (torch.arange(support.sinks, device=device) <= position).unsqueeze(0)
        return state.merge(selected_state(rows.queries, sink_keys, sink_values, scale, apart))

    def read(self, table: BlockTable, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads, stop - start, head_dim] of consecutive rows, in the cache dtype."""
        shape = (self.geometry.kv_heads, stop - start, self.geometry.head_dim)
        kind = torch_dtype(self.layout)
        device = table.segments[0].device if table.segments else "cpu"
        keys, values = torch.empty(shape, dtype=kind, device=device), torch.empty(shape, dtype=kind, device=device)
        self.kernel.gather(table, start, stop, keys, values)
        return keys, values

    def unit_mass(
        self,
        rows: StepRows,
        chosen: ChosenRows,
        support: Support,
        state: PartialState,
        units: int,
        turned: Repositioned | None = None,
    ) -> Tensor:
        """Weight fp32 [query_heads, units] that the rows of every unit got, of the step's rows together."""
        query, keys = self._turned(rows, chosen, support, turned)
        weights = selected_weights(
            query, keys, state, self.geometry.scale, chosen.visible.unsqueeze(1), support.log_bias
        ).sum(1)
        columns = support.columns.clamp_min(0)
        each = columns.repeat_interleave(weights.shape[0] // columns.shape[0], dim=0)
        return torch.zeros(weights.shape[0], units).scatter_add_(1, each, weights)
