"""Attention over a support whose rows lie in tensors: what the frame does over a store, for recorded rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.kernels.selected import selected_state, selected_weights
from kvstrata.kernels.state import PartialState
from kvstrata.methods.interface import Geometry, StepRows
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.placement.expansion import Support

__all__ = ["RecordedAttention"]


@dataclass(frozen=True, eq=False)
class _Gathered:
    keys: Tensor
    values: Tensor
    visible: Tensor


class RecordedAttention:
    """One layer's rows: keys, values [kv_heads, tokens, head_dim]. For steps of one row."""

    def __init__(self, geometry: Geometry, keys: Tensor, values: Tensor) -> None:
        self.geometry = geometry
        self.keys = keys
        self.values = values

    def gather(self, support: Support) -> _Gathered:
        """The chosen rows, [owners, n, head_dim]; a list for the whole layer is read for every K/V head."""
        rows = self._each(support.rows)
        heads = self._heads(rows.shape[0]).unsqueeze(-1)
        place = rows.clamp_min(0)
        return _Gathered(self.keys[heads, place], self.values[heads, place], rows != NO_UNIT)

    def attend(
        self, rows: StepRows, selection: Selection, support: Support, gathered: _Gathered
    ) -> tuple[Tensor, PartialState]:
        """Output fp32 [query_heads, 1, head_dim] over persistent and chosen rows, and the state before a correction."""
        scale, turned = self.geometry.scale, selection.repositioned
        state = self._over(rows.queries, support.recent, support.visible)
        if turned is not None and turned.sink_keys is not None:
            sinks = self.values[:, : support.sinks]
            state = state.merge(selected_state(turned.query, turned.sink_keys, sinks, scale))
        else:
            state = state.merge(self._over(rows.queries, 0, support.sinks))
        query, keys = self._turned(rows, selection, support, gathered)
        state = state.merge(
            selected_state(query, keys, gathered.values, scale, gathered.visible.unsqueeze(1), support.log_bias)
        )
        output = state.output()
        if selection.correction is not None:
            share = selection.correction.share.view(-1, 1, 1)
            value = selection.correction.value.repeat_interleave(self.geometry.group, dim=0).unsqueeze(1)
            output = share * output + (1 - share) * value
        return output, state

    def dense(self, rows: StepRows) -> Tensor:
        """The same reference over every row, [query_heads, 1, head_dim]."""
        return self._over(rows.queries, 0, rows.stop).output()

    def unit_mass(
        self, rows: StepRows, selection: Selection, support: Support, gathered: _Gathered, state: PartialState
    ) -> Tensor:
        """Weight fp32 [query_heads, units] that the rows of every chosen unit got."""
        query, keys = self._turned(rows, selection, support, gathered)
        seen = gathered.visible.unsqueeze(1)
        weights = selected_weights(query, keys, state, self.geometry.scale, seen, support.log_bias).sum(1)
        columns = support.columns.repeat_interleave(weights.shape[0] // support.columns.shape[0], dim=0)
        return torch.zeros(weights.shape[0], selection.units.shape[1]).scatter_add_(1, columns.clamp_min(0), weights)

    def _turned(
        self, rows: StepRows, selection: Selection, support: Support, gathered: _Gathered
    ) -> tuple[Tensor, Tensor]:
        turned = selection.repositioned
        if turned is None:
            return rows.queries, gathered.keys
        order = self._each(support.order)
        each = turned.keys
        if each.shape[0] != order.shape[0]:
            each = each[self._heads(order.shape[0])]
        return turned.query, each.gather(1, order.unsqueeze(-1).expand(-1, -1, each.shape[-1]))

    def _over(self, queries: Tensor, start: int, stop: int) -> PartialState:
        return selected_state(queries, self.keys[:, start:stop], self.values[:, start:stop], self.geometry.scale)

    def _each(self, lists: Tensor) -> Tensor:
        return lists.expand(self.geometry.kv_heads, -1) if lists.shape[0] == 1 else lists

    def _heads(self, owners: int) -> Tensor:
        return torch.arange(owners) // (owners // self.geometry.kv_heads)
