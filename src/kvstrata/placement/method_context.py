"""What the frame offers to a method, for one sequence of a live request."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvstrata.contract.budget import Persistent, SelectionBudget
from kvstrata.errors import Reason, StateError
from kvstrata.methods.in_memory import seeded_generator
from kvstrata.methods.interface import Geometry
from kvstrata.placement.gate import widened
from kvstrata.placement.policy import SelectionPolicy
from kvstrata.ports import ModelView

__all__ = ["FrameContext", "ReadsRows"]


class ReadsRows(Protocol):
    """Where a context gets its rows. Both block until they are there."""

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads, stop - start, head_dim]."""
        ...

    def read_at(self, layer: int, rows: Tensor) -> Tensor:
        """Keys [owners, n, head_dim] of `rows` int64 [owners, n]; zeros for `NO_UNIT`."""
        ...


class FrameContext:
    """`MethodContext` of a live step. The frame sets the step and the layer before it calls a method.

    first, visible: rows that the step's first and last row see.
    """

    def __init__(
        self, policy: SelectionPolicy, geometry: Geometry, source: ReadsRows, basis: object, view: ModelView | None
    ) -> None:
        self.geometry = geometry
        self.basis = basis
        self.view = view
        self.budget: SelectionBudget = policy.budget
        self.persistent: Persistent = policy.persistent
        self.visible = 0
        self.first = 0
        self._policy = policy
        self._source = source
        self._hidden: dict[int, Tensor] = {}

    def begin_step(self, start: int, rows: int) -> None:
        """A step of `rows` rows from position `start` on."""
        self.first, self.visible = start + 1, start + rows
        self._hidden.clear()

    def enter(self, layer: int) -> None:
        """Everything that follows is about `layer`."""
        self.budget = self._policy.budget_of(layer)
        given = self._policy.persistent
        self.persistent = self._policy.method.persistent(given, self.budget.limit(self.visible))

    def widen(self, factor: float) -> None:
        """Search again with a budget that is wider by `factor`."""
        self.budget = widened(self.budget, factor)

    def note_hidden(self, layer: int, hidden: Tensor) -> None:
        """The residual stream [rows, hidden_size] that enters `layer`."""
        self._hidden[layer] = hidden

    @property
    def limit(self) -> int:
        """Rows that one owner may have in all."""
        return self.budget.limit(self.visible)

    @property
    def region(self) -> tuple[int, int]:
        """See `MethodContext.region`."""
        return self.persistent.bounds(self.first)

    @property
    def allowance(self) -> int:
        """See `MethodContext.allowance`."""
        sinks, recent = self.region
        return max(0, self.limit - sinks - min(self.visible - recent, self.persistent.recent))

    def keys(self, layer: int, start: int, stop: int) -> Tensor:
        """See `MethodContext.keys`."""
        return self._source.read(layer, start, stop)[0]

    def keys_at(self, layer: int, rows: Tensor) -> Tensor:
        """See `MethodContext.keys_at`."""
        return self._source.read_at(layer, rows)

    def values(self, layer: int, start: int, stop: int) -> Tensor:
        """See `MethodContext.values`."""
        return self._source.read(layer, start, stop)[1]

    def hidden(self, layer: int) -> Tensor:
        """See `MethodContext.hidden`."""
        if layer not in self._hidden:
            raise StateError(
                Reason.NOT_COMMITTED, f"the residual stream of layer {layer} is not there", "declare `needs_hidden`"
            )
        return self._hidden[layer]

    def has_hidden(self, layer: int) -> bool:
        """Whether the step has come so far."""
        return layer in self._hidden

    def generator(self, layer: int, purpose: str = "") -> torch.Generator:
        """See `MethodContext.generator`."""
        return seeded_generator(self._policy.seed, layer, purpose)
