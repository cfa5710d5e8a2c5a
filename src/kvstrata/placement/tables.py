"""The block tables of one history: which slot holds which segment, layer by layer, checked before a kernel reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import Reason, StateError
from kvstrata.kernels.block_table import BlockTable
from kvstrata.store.history import History
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["HistoryTables"]


class HistoryTables:
    """One table for every layer of one history. Used by one thread.

    layers: the tables. segment: the tensor of a slot, uint8.
    """

    def __init__(
        self, arena: MemoryArena, layers: int, layout: SegmentLayout, segment: Callable[[int], torch.Tensor]
    ) -> None:
        self.layers = [BlockTable(layout) for _ in range(layers)]
        self._arena = arena
        self._segment = segment
        self._grants = np.zeros((2, layers, 0), np.int64)
        self._verified = [(-1, 0)] * layers
        self._addresses: dict[int, int] = {}

    def rebuild(self, history: History) -> None:
        """Enter every segment of `history` that is in memory."""
        width = len(history.chunks) + len(history.tail)
        self._grants = np.zeros((2, len(self.layers), width), np.int64)
        for layer, table in enumerate(self.layers):
            table.truncate(0)
            self.enter_chunks(history, layer)
            self._enter(layer, len(history.chunks), [chunk.grants[layer] for chunk in history.tail])

    def enter_chunks(self, history: History, layer: int) -> None:
        """Enter the sealed segments of one layer anew."""
        self._enter(layer, 0, [record.grants[layer] for record in history.chunks])

    def verified(self, layer: int, first: int) -> BlockTable:
        """The table of `layer`, whose segments from chunk `first` on are what they were when they were entered.

        Errors: `StateError` for a slot that is empty or has changed hands.
        """
        state = (self._arena.epoch, first)
        if self._verified[layer] != state:
            slots, generations = self._grants[0, layer, first:], self._grants[1, layer, first:]
            if not (self._arena.generations[slots] == generations).all():
                raise StateError(Reason.NOT_COMMITTED, f"a slot of layer {layer} changed hands under its table")
            self._verified[layer] = state
        return self.layers[layer]

    def verified_chunks(self, layer: int, chunks: Sequence[int]) -> BlockTable:
        """As `verified`, for the segments of the chunks with these numbers only."""
        slots, generations = self._grants[:, layer, chunks]
        if not (self._arena.generations[slots] == generations).all():
            raise StateError(Reason.NOT_COMMITTED, f"a slot of layer {layer} changed hands under its table")
        return self.layers[layer]

    def slots(self, layer: int) -> npt.NDArray[np.int64]:
        """The slot of every chunk of `layer`; 0 where it has none."""
        slots: npt.NDArray[np.int64] = self._grants[0, layer]
        return slots

    def close(self) -> None:
        """Let go of the arena's memory."""
        for table in self.layers:
            table.truncate(0)

    def _enter(self, layer: int, start: int, grants: Sequence[Grant | None]) -> None:
        table, (slots, generations) = self.layers[layer], self._grants[:, layer]
        self._verified[layer] = (-1, 0)
        for index, grant in enumerate(grants, start):
            if grant is None:
                # A generation no slot ever has: reading this entry before it is filled is refused.
                slots[index], generations[index] = 0, -1
                table.set(index, self._segment(0))
            elif generations[index] != grant.generation or slots[index] != grant.slot or index >= len(table):
                slots[index], generations[index] = grant.slot, grant.generation
                self._put(table, index, grant.slot)

    def _put(self, table: BlockTable, index: int, slot: int) -> None:
        known = self._addresses.get(slot)
        if known is not None and index < len(table):
            table.replace(index, self._segment(slot), known)
        else:
            table.set(index, self._segment(slot))
            self._addresses[slot] = table.address(index)
