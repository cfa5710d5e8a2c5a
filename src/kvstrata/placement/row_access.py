"""Where the rows of one sequence are in a step, and how they come to whoever reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from kvstrata.contract.capability import HOST
from kvstrata.contract.method import ComputeSite
from kvstrata.placement.expansion import Support
from kvstrata.placement.near_data import HostRows
from kvstrata.placement.on_demand import OnDemand
from kvstrata.placement.support_attention import SupportAttention
from kvstrata.store.history import History

__all__ = ["RowAccess"]


class RowAccess:
    """Rows of `history` for its method and its frame. charge: told the bytes that were brought, by tier.

    Attributes:
        chosen: layers whose rows are brought in when they are asked for; all of the others' are there.
    """

    def __init__(
        self,
        history: History,
        attention: SupportAttention,
        site: ComputeSite,
        charge: Callable[[Iterable[tuple[str, int]]], None],
    ) -> None:
        self.history = history
        self.chosen: frozenset[int] = frozenset()
        self._attention = attention
        self._near_site = site is ComputeSite.NEAR_DATA
        self._near = HostRows(history.directory)
        self._charge = charge
        self._plan: OnDemand | None = None
        self._place = 0

    def bind(self, plan: OnDemand, place: int) -> None:
        """The plan of the step, and the place of the history in it."""
        self._plan, self._place = plan, place

    @property
    def plan(self) -> OnDemand:
        """The plan of the step."""
        assert self._plan is not None, "a step began without a plan"
        return self._plan

    @property
    def alone(self) -> bool:
        """Whether the plan is of no other history."""
        return len(self.plan.histories) == 1

    @property
    def chunk_tokens(self) -> int:
        """Tokens a chunk."""
        return self.history.context.chunk_tokens

    def slots(self, layer: int, device: torch.device) -> Tensor:
        """The slot of every chunk, int64."""
        return torch.from_numpy(self.plan.tables[self._place].slots(layer)).to(device)

    def fetch(self, layer: int, chunks: Collection[int]) -> None:
        """Begin to bring chunks in, as far as there is room. Does not block for reads."""
        self.plan.fetch(layer, self._place, sorted(chunks))

    def arrive(self, layer: int, chunks: Collection[int], *, charged: bool = True) -> None:
        """Bring chunks in and wait for them. charged: whether the layer's selection needs them."""
        fetched = self.plan.arrive(layer, self._place, sorted(chunks))
        if charged:
            self._charge(fetched.read_bytes(self.plan.lower))

    def arrive_all(self, layer: int, *, charged: bool = True) -> None:
        """Bring every chunk in and wait for it."""
        self.arrive(layer, range(len(self.history.chunks)), charged=charged)

    def chunks_of(self, layer: int, support: Support) -> tuple[set[int], dict[int, Tensor]]:
        """(chunks that the device must hold, segments in the host tier that are read where they lie)."""
        size = self.chunk_tokens
        kept = {*range(-(-support.sinks // size)), *range(support.recent // size, -(-support.visible // size))}
        wanted, near = self._device_and_near(layer, self._named(support.rows) - kept)
        return kept | wanted, near

    def give_back(self) -> None:
        """End all loans of segments that were read where they lie."""
        self._near.give_back()

    def lies_in(self, rows: Tensor, chunks: Collection[int]) -> Tensor:
        """Which of `rows` lie in `chunks`, bool."""
        wanted = torch.tensor(sorted(chunks), dtype=torch.int64, device=rows.device)
        return torch.isin(rows.div(self.chunk_tokens, rounding_mode="floor"), wanted)

    def missing(self, layer: int) -> set[int]:
        """Chunks that the device does not hold."""
        return {number for number, record in enumerate(self.history.chunks) if record.grants[layer] is None}

    @property
    def first_missing(self) -> int:
        """The first chunk that the device does not hold in some layer that chooses; the number of chunks if none."""
        chunks = len(self.history.chunks)
        return min((min(self.missing(layer), default=chunks) for layer in self.chosen), default=chunks)

    def rows_outside(self, chunks: Collection[int], visible: int) -> list[int]:
        """Rows of the `visible` ones that lie in none of `chunks`."""
        return [row for row in range(visible) if row // self.chunk_tokens not in chunks]

    def missing_bytes(self, layer: int) -> dict[str, int]:
        """Bytes by tier that would have to come to the device for all rows of `layer`."""
        nbytes: dict[str, int] = {}
        for number in self.missing(layer):
            tier = HOST if self._near.has(self.history.chunks[number], layer) else self.plan.lower
            nbytes[tier] = nbytes.get(tier, 0) + self._attention.layout.segment_bytes
        return nbytes

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `ReadsRows.read`."""
        size = self.chunk_tokens
        if layer in self.chosen:
            self.arrive(layer, range(start // size, -(-stop // size)))
        return self._attention.read(self.plan.tables[self._place].layers[layer], start, stop)

    def read_at(self, layer: int, rows: Tensor) -> Tensor:
        """See `ReadsRows.read_at`: where they lie, if the method computes near the data."""
        wanted, near = self._device_and_near(layer, self._named(rows))
        if layer in self.chosen:
            self.arrive(layer, wanted)
        table, slots = self.plan.tables[self._place].layers[layer], self.slots(layer, rows.device)
        here = self._attention.gather(table, slots, rows, ~self.lies_in(rows, near) if near else None)
        keys = here.keys.masked_fill(~here.visible.unsqueeze(-1), 0.0)
        if near:
            there = self._attention.gather_near(near, rows)
            keys = torch.where(there.visible.unsqueeze(-1), there.keys, keys)
        return keys

    def _device_and_near(self, layer: int, chunks: set[int]) -> tuple[set[int], dict[int, Tensor]]:
        near: dict[int, Tensor] = {}
        if self._near_site:
            for chunk in sorted(chunks):
                record = self.history.chunks[chunk] if chunk < len(self.history.chunks) else None
                segment = None
                if record is not None and record.grants[layer] is None:
                    segment = self._near.borrow(record, layer)
                if segment is not None:
                    near[chunk] = segment
        return chunks - near.keys(), near

    def _named(self, rows: Tensor) -> set[int]:
        named = torch.unique(rows.div(self.chunk_tokens, rounding_mode="floor")).tolist()
        return {chunk for chunk in named if chunk >= 0}
