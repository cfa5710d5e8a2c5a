"""A method's context over rows that lie in tensors: for measuring methods on recorded rows, without an engine."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from kvstrata.contract.budget import Persistent, SelectionBudget
from kvstrata.errors import Reason, StateError
from kvstrata.methods.interface import Geometry
from kvstrata.methods.selection import NO_UNIT
from kvstrata.ports import ModelView

__all__ = ["InMemoryContext", "seeded_generator"]


class InMemoryContext:
    """`MethodContext` over `rows`: for each layer keys and values [kv_heads, tokens, head_dim].

    read_bytes: bytes that the method asked for through `keys`, `keys_at` and `values`. Rows that are not visible are
    refused with a `StateError`.
    """

    def __init__(
        self,
        geometry: Geometry,
        rows: dict[int, tuple[Tensor, Tensor]],
        budget: SelectionBudget,
        persistent: Persistent,
        visible: int,
        *,
        basis: object = None,
        view: ModelView | None = None,
        hidden: dict[int, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        self.geometry = geometry
        self.rows = rows
        self.budget = budget
        self.persistent = persistent
        self.visible = visible
        self.basis = basis
        self.view = view
        self.read_bytes = 0
        self._hidden = hidden or {}
        self._seed = seed

    @property
    def region(self) -> tuple[int, int]:
        """See `MethodContext.region`."""
        return self.persistent.bounds(self.visible)

    @property
    def allowance(self) -> int:
        """See `MethodContext.allowance`."""
        sinks, recent = self.region
        return max(0, self.budget.limit(self.visible) - sinks - (self.visible - recent))

    def keys(self, layer: int, start: int, stop: int) -> Tensor:
        """See `MethodContext.keys`."""
        return self._read(self.rows[layer][0], start, stop)

    def keys_at(self, layer: int, rows: Tensor) -> Tensor:
        """See `MethodContext.keys_at`."""
        keys = self.rows[layer][0]
        heads = torch.arange(rows.shape[0], device=keys.device) // (rows.shape[0] // keys.shape[0])
        real = rows != NO_UNIT
        if bool((rows < NO_UNIT).any() | (rows >= min(self.visible, keys.shape[1])).any()):
            raise StateError(
                Reason.NOT_COMMITTED,
                f"rows from {int(rows.min())} to {int(rows.max())} were asked for; {self.visible} are visible",
            )
        found = keys[heads.unsqueeze(-1), rows.clamp_min(0)].masked_fill(~real.unsqueeze(-1), 0.0)
        self.read_bytes += int(real.sum()) * keys.shape[-1] * keys.element_size()
        return found

    def values(self, layer: int, start: int, stop: int) -> Tensor:
        """See `MethodContext.values`."""
        return self._read(self.rows[layer][1], start, stop)

    def hidden(self, layer: int) -> Tensor:
        """See `MethodContext.hidden`."""
        if layer not in self._hidden:
            raise StateError(Reason.NOT_COMMITTED, f"the residual stream of layer {layer} was not recorded")
        return self._hidden[layer]

    def generator(self, layer: int, purpose: str = "") -> torch.Generator:
        """See `MethodContext.generator`."""
        return seeded_generator(self._seed, layer, purpose)

    def _read(self, plane: Tensor, start: int, stop: int) -> Tensor:
        if not 0 <= start <= stop <= min(self.visible, plane.shape[1]):
            raise StateError(
                Reason.NOT_COMMITTED,
                f"rows [{start}, {stop}) were asked for; {self.visible} of {plane.shape[1]} are visible",
            )
        rows = plane[:, start:stop]
        self.read_bytes += rows.numel() * rows.element_size()
        return rows


def seeded_generator(seed: int, layer: int, purpose: str) -> torch.Generator:
    """A CPU generator for (seed, layer, purpose): the same in every process."""
    name = hashlib.sha256(f"{seed}/{layer}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(name[:8], "little") >> 1)
