"""The one interface of all methods: a frozen configuration, a contract, and steps that the frame calls.

The frame (`kvstrata.placement.selecting`) owns everything that methods have in common: when a step selects at all,
persistent rows, the expansion of units to rows, duplicates, validation, gathering or near-data compute, attention,
receipts and fallbacks. A method says which units matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvstrata.contract.budget import Persistent, SelectionBudget
from kvstrata.contract.encoding import digest
from kvstrata.contract.method import MethodContract, Owner
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.selection import Selection
from kvstrata.ports import ModelView

__all__ = [
    "MAX_UNIT_ROWS",
    "Geometry",
    "Index",
    "Method",
    "MethodContext",
    "StepRows",
    "require_at_least",
    "require_member",
    "require_positive",
    "require_unit_rows",
]


MAX_UNIT_ROWS = 65_536
"""Rows of a page or block at most: an index reserves whole ones, and a typing error must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes of a model's attention. scale: multiplies the scores before the softmax. windows: of each layer, or `None`
    for no window. sinks: whether heads have learned sink logits."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.query_heads // self.kv_heads

    def owners(self, owner: Owner) -> int:
        """How many owners of that kind a layer has."""
        return {Owner.QUERY_HEAD: self.query_heads, Owner.KV_HEAD: self.kv_heads, Owner.LAYER: 1}[owner]


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows that a step computes in one layer. start: position of the first.

    queries [query_heads, rows, head_dim]; keys, values [kv_heads, rows, head_dim], after rotary positions, in the
    model's dtype: views, so copy what you keep.
    """

    start: int
    queries: Tensor
    keys: Tensor
    values: Tensor

    @property
    def stop(self) -> int:
        """Position after the last."""
        return self.start + int(self.keys.shape[1])


class Index:
    """What a method keeps for one layer of one sequence. Methods subclass it.

    frontier: rows [0, frontier) are in it. generation: moves with every change. nbytes: of proxy and index, payload
    copies included.
    """

    frontier: int = 0
    generation: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are its own attributes; a method that keeps them elsewhere counts them itself."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


IndexT = TypeVar("IndexT", bound=Index)


class MethodContext(Protocol):
    """What the frame offers to a method in a step, for one sequence.

    visible: rows that the step's last row sees, itself included. budget, persistent: in force for the layer at hand.
    basis: what `Method.prepare` returned. view: the live model, or `None` outside an engine.
    """

    geometry: Geometry
    budget: SelectionBudget
    persistent: Persistent
    visible: int
    basis: object
    view: ModelView | None

    @property
    def region(self) -> tuple[int, int]:
        """The positions [first, stop) that a selection may choose from: all but the persistent ones."""
        ...

    @property
    def allowance(self) -> int:
        """Rows that an owner may still choose beside the persistent ones."""
        ...

    def keys(self, layer: int, start: int, stop: int) -> Tensor:
        """Keys [kv_heads, stop - start, head_dim] as the store holds them, brought to the device and charged as read.
        Blocks."""
        ...

    def keys_at(self, layer: int, rows: Tensor) -> Tensor:
        """Keys [owners, n, head_dim] of single `rows` int64 [owners, n], for query heads or K/V heads as owners.

        Zeros for `NO_UNIT`. Charged as read; where the method computes near the data they are read where they lie.
        Blocks.
        """
        ...

    def values(self, layer: int, start: int, stop: int) -> Tensor:
        """Values, as `keys`."""
        ...

    def hidden(self, layer: int) -> Tensor:
        """The residual stream [rows, hidden_size] that enters `layer` in this step.

        Errors: `StateError` unless the contract has `needs_hidden`, and before the step has come so far.
        """
        ...

    def generator(self, layer: int, purpose: str = "") -> torch.Generator:
        """Randomness that depends on the configured seed, the layer and `purpose` only. On the CPU."""
        ...


@dataclass(frozen=True)
class Method(ABC, Generic[IndexT]):
    """A frozen configuration. Subclasses are frozen dataclasses with a `contract`; the frame holds all state.

    Within a layer's step the frame calls: `observe` (where the step attends to everything), `append` where there is an
    index, `select`, and `feedback` after attention; `build` once there is history enough, in a step that reads all
    rows of the layer anyway; `speculate` for the next layer before this layer attends.
    """

    contract: ClassVar[MethodContract]

    @property
    def digest(self) -> str:
        """Hexadecimal digest of method, version and configuration: part of the lineage of what is computed under it."""
        return digest("method/1", (self.contract.name, self.contract.version, self)).hex()

    @property
    def owner(self) -> Owner:
        """Whose selections this configuration makes."""
        return self.contract.owner

    def dense(self, geometry: Geometry) -> tuple[int, ...]:
        """Layers that attend to everything unless a policy says otherwise: the field `dense_layers` where there is one,
        a number of first layers or the layers themselves."""
        named = getattr(self, "dense_layers", 0)
        layers = range(named) if isinstance(named, int) else named
        return tuple(layer for layer in layers if layer < geometry.layers)

    def persistent(self, given: Persistent, limit: int) -> Persistent:
        """The rows that always enter, where a policy gives `given` and allows `limit` rows in all."""
        return given

    def require(self, geometry: Geometry) -> None:
        """Errors: `UnsupportedError` for a model that the method cannot serve; `ConfigurationError` for settings that
        do not fit its shapes."""

    def require_budget(self, budget: SelectionBudget) -> None:
        """Errors: `ConfigurationError` for a kind of budget that the method cannot keep."""

    def prepare(self, view: ModelView | None, geometry: Geometry) -> object:
        """What all sequences of a model share, made once: projectors, bases, column ids. `None` for nothing."""
        return None

    def observe(self, ctx: MethodContext, layer: int, index: IndexT | None, rows: StepRows) -> IndexT | None:
        """Evidence from rows that attended to everything. Returns the index as it is then, or `None` for none yet.

        A method that needs the queries of a prefill begins its index here; the frame sets no frontier.
        """
        return index

    @abstractmethod
    def build(self, ctx: MethodContext, layer: int, index: IndexT | None) -> IndexT:
        """The index over rows [0, ctx.visible). index: what `observe` has made of the evidence."""

    @abstractmethod
    def append(self, ctx: MethodContext, layer: int, index: IndexT, rows: StepRows) -> IndexT:
        """The next generation, with the step's rows in it."""

    def truncate(self, index: IndexT, frontier: int) -> IndexT | None:
        """The index over rows [0, frontier) alone, after the others were taken back; `None` to have it built anew."""
        return None

    def speculate(self, ctx: MethodContext, layer: int, index: IndexT, hidden: Tensor) -> Selection | None:
        """Choose for `layer` from the residual stream `hidden` [rows, hidden_size] that entered the layer before it.

        The step's own rows are not in the index yet. `None` leaves the choice to `select`.
        """
        return None

    @abstractmethod
    def select(self, ctx: MethodContext, layer: int, index: IndexT, rows: StepRows) -> Selection:
        """Choose units for the step's rows. Units may reach outside `ctx.region`; rows there are not read twice."""

    def rows_of(self, index: IndexT, units: Tensor) -> Tensor:
        """Positions int64 [owners, n * m] of the members of `units` [owners, n], those of one unit together.

        Filled up with `NO_UNIT`. Every row belongs to exactly one unit. Units are rows unless overridden.
        """
        return units

    def unit_span(self, index: IndexT) -> tuple[int, int, int]:
        """(units, start, stop): the units [0, units) of `index` hold the rows [start, stop), each of them once."""
        return index.frontier, 0, index.frontier

    def feedback(self, ctx: MethodContext, layer: int, index: IndexT, selection: Selection, mass: Tensor) -> None:
        """After attention: `mass` fp32 [query_heads, units], the weight that the rows of each chosen unit got."""


def require_positive(field: str, value: object) -> None:
    """Errors: `ConfigurationError` naming field and value unless `value` is a whole number of at least 1."""
    require_at_least(field, value, 1)


def require_at_least(field: str, value: object, least: int) -> None:
    """Errors: `ConfigurationError` naming field and value unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"{field} must be a whole number of at least {least}, got {value!r}"
        )


def require_unit_rows(field: str, value: int) -> None:
    """Errors: `ConfigurationError` naming field and value unless `value` is a number of rows that a unit may have."""
    require_positive(field, value)
    if value > MAX_UNIT_ROWS:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be at most {MAX_UNIT_ROWS}, got {value!r}")


def require_member(field: str, value: object, allowed: Sequence[Enum]) -> None:
    """Errors: `ConfigurationError` naming field and value unless `value` is one of `allowed`, not just its text."""
    if not any(value is member for member in allowed):
        names = ", ".join(f"{type(member).__name__}.{member.name}" for member in allowed)
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be one of {names}, got {value!r}")
