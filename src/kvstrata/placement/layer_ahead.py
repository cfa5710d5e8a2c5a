"""Exact decoding with part of the history in files: cold segments come back ahead of the layer that needs them.

A fixed set of chunks stays resident in all layers. The others are read into slots one or two layers ahead and leave
again when their layer is done, so that the memory holds at most `depth` layers of them. Every legal row enters
attention; only its place differs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.receipts import StepReceipt
from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.residency import plan_residency, required_slots
from kvstrata.errors import BudgetError, Reason, StateError, StoreError
from kvstrata.kernels.block_table import BlockTable
from kvstrata.ports import Clock
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.history import History
from kvstrata.store.promotion import Batch, Promoter
from kvstrata.store.publication import Publisher
from kvstrata.tiers.memory import Grant

__all__ = ["LayerAhead"]


class LayerAhead:
    """The exact plan of one request. Used by one thread: begin_step, then before_layer and after_layer for every layer
    in order, then end_step or abort_step.

    history: the request's rows. segment: the tensor of a slot, uint8. promoter, publisher: None without a file tier.
    budget_for: turns slots into the bytes of a budget that would give that many. depth: layers in flight.
    """

    def __init__(
        self,
        history: History,
        layout: SegmentLayout,
        segment: Callable[[int], torch.Tensor],
        promoter: Promoter | None,
        publisher: Publisher | None,
        budget_for: Callable[[int], int],
        depth: int = 2,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.history = history
        self.directory: Directory = history.directory
        self.layers = self.directory.layers
        self.tables = [BlockTable(layout) for _ in range(self.layers)]
        self.dirty = True
        self._segment = segment
        self._promoter = promoter
        self._publisher = publisher
        self._budget_for = budget_for
        self._wanted_depth = depth
        self._clock = clock
        self._depth = 0
        self._kept: set[int] = set()
        self._cold: list[int] = []
        self._missing: set[int] = set()
        self._staged: dict[int, Batch] = {}
        self._next_layer = 0
        self._planned: tuple[int, int, int] | None = None
        self._grants = np.zeros((2, self.layers, 0), np.int64)
        self._verified = [-1] * self.layers
        self._addresses: dict[int, int] = {}
        self.staged_peak = 0
        self._reset_counters()

    def begin_step(self, rows: int) -> None:
        """Make room for `rows` more rows and start the first reads. Blocks while chunks must be written to make room.

        Errors: `BudgetError` when the tail and one layer's segments do not fit, with the budget that would do;
        `StoreError` when room could only be made by writing, and writing failed.
        """
        self._reset_counters()
        history = self.history
        state = (len(history.chunks), history.tail_chunks_for(rows), history.version)
        if self.dirty or state != self._planned:
            self._replan(rows)
            self._planned = (len(history.chunks), history.tail_chunks_for(rows), history.version)
            self.dirty = False
        self._stage()

    def before_layer(self, layer: int) -> BlockTable:
        """The block table of `layer`, complete. Blocks until the cold segments have arrived and been verified.

        Errors: `DamagedError` or `StoreError` from reading; the step must be aborted then.
        """
        batch = self._staged.get(layer)
        if batch is None and (self._cold or layer in self._missing):
            if self._stage_layer(layer):
                batch = self._staged.get(layer)
            if batch is None:
                raise StateError(Reason.NOT_COMMITTED, f"no slots are free for the cold segments of layer {layer}")
        if batch is not None:
            start = self._clock()
            # Taken off the list afterwards: an interrupt while waiting must not lose the slots.
            nbytes, read_s = batch.finish()
            del self._staged[layer]
            self._stall_s += self._clock() - start
            self._moved_bytes += nbytes
            self._moved_segments += len(batch.items)
            self._read_s += read_s
            self._enter_layer(layer)
        arena = self.directory.arena
        epoch = arena.epoch
        if self._verified[layer] != epoch:
            slots, generations = self._grants[0, layer], self._grants[1, layer]
            if not (arena.generations[slots] == generations).all():
                raise StateError(Reason.NOT_COMMITTED, f"a slot of layer {layer} changed hands under its table")
            self._verified[layer] = epoch
        return self.tables[layer]

    def after_layer(self, layer: int) -> None:
        """Give the cold segments of `layer` up and start reading for a later layer."""
        for index in self._cold:
            self.directory.evict(self.history.chunks[index], layer)
        if self._cold or self._staged:
            self._stage()

    def end_step(self, start: int, rows: int, sealed: int) -> StepReceipt:
        """The step's receipt."""
        size = self.directory.arena.slot_bytes
        segments = self.layers * (len(self.history.chunks) - sealed) - self._moved_segments
        row_bytes = size // self.history.context.chunk_tokens
        tail_rows = start + rows - (len(self.history.chunks) - sealed) * self.history.context.chunk_tokens
        return StepReceipt(
            start=start,
            rows=rows,
            visible=start + rows,
            resident_bytes=max(0, segments) * size + self.layers * tail_rows * row_bytes,
            moved_bytes=self._moved_bytes,
            moved_segments=self._moved_segments,
            stall_s=self._stall_s,
            read_s=self._read_s,
            sealed=sealed,
        )

    def abort_step(self) -> None:
        """Forget reads under way, after their readers have acknowledged. The next step plans anew."""
        for batch in self._staged.values():
            # A late reader keeps its slots until it acknowledges; the next plan does without them.
            with contextlib.suppress(StoreError):
                batch.abandon()
        self._staged.clear()
        self.dirty = True

    def yield_memory(self) -> None:
        """Give up every slot that another request may use: all segments with a valid file replica.

        Blocks while segments are being written.
        """
        self.abort_step()
        for record in self.history.chunks:
            if record.file is FileReplicaState.WRITING and self._publisher is not None:
                self._publisher.wait(record)
            if record.evictable:
                for layer in range(self.layers):
                    self.directory.evict(record, layer)

    def close(self) -> None:
        """End what is under way and let go of the arena's memory."""
        self.abort_step()
        for table in self.tables:
            table.truncate(0)

    def _replan(self, rows: int) -> None:
        self.abort_step()
        history, arena = self.history, self.directory.arena
        chunks, tail = len(history.chunks), history.tail_chunks_for(rows)
        own = len(history.tail) * self.layers + sum(record.resident for record in history.chunks)
        plan = plan_residency(arena.free_slots + own, self.layers, chunks, tail, self._wanted_depth)
        if plan is None:
            need = self._budget_for(required_slots(self.layers, chunks, tail) + arena.used_slots - own)
            raise BudgetError(
                Reason.BUDGET_TOO_SMALL,
                f"{history.frontier} tokens and {rows} more need a memory budget of at least {need} bytes: "
                f"{tail} open chunks in {self.layers} layers, and the {chunks} sealed segments of one layer",
                f"pass budget={need} or more, a smaller prefill_chunk, or a shorter history",
                required_bytes=need,
            )
        pinned = self._settle(plan.resident_chunks)
        rest = sorted((i for i in range(chunks) if i not in pinned), key=lambda i: (-history.chunks[i].resident, i))
        self._kept = pinned | set(rest[: plan.resident_chunks - len(pinned)])
        self._cold = [i for i in range(chunks) if i not in self._kept]
        self._depth = plan.depth
        for index in self._cold:
            for layer in range(self.layers):
                self.directory.evict(history.chunks[index], layer)
        self._missing = {layer for layer in range(self.layers) if self._needed(layer)}
        if not history.extend_tail(rows):
            raise StateError(Reason.NOT_COMMITTED, "the plan promised slots for the tail that are not free")
        self._rebuild_tables()
        self._next_layer = 0

    def _settle(self, resident_chunks: int) -> set[int]:
        """Wait until at most `resident_chunks` chunks have no valid file replica; return those."""
        chunks = self.history.chunks
        tried: set[bytes] = set()
        while True:
            unsafe = [i for i, record in enumerate(chunks) if not record.evictable]
            if len(unsafe) <= resident_chunks:
                return set(unsafe)
            oldest = chunks[unsafe[0]]
            if self._publisher is None:
                need = self._budget_for(len(chunks) * self.layers + self.directory.arena.used_slots)
                raise BudgetError(
                    Reason.BUDGET_TOO_SMALL,
                    f"{len(chunks)} chunks do not fit the memory budget, and no writable store could take them",
                    f"open a writable store, or pass budget={need}",
                    required_bytes=need,
                )
            if oldest.file is not FileReplicaState.WRITING:
                # An earlier failure may be over by now; one that repeats is the caller's to see.
                if oldest.digest in tried:
                    raise oldest.failure or StoreError(Reason.STORE_IO, "a chunk could not be written")
                tried.add(oldest.digest)
                self._publisher.submit(oldest)
            self._stall_s += self._publisher.wait(oldest)

    def _needed(self, layer: int) -> list[tuple[ChunkRecord, int]]:
        chunks = self.history.chunks
        return [(record, layer) for record in chunks if record.grants[layer] is None]

    def _stage(self) -> None:
        """Start reads for the coming layers while slots and the planned depth allow."""
        if self._promoter is None or not (self._cold or self._missing):
            return
        for _ in range(self.layers):
            if len(self._staged) >= self._depth and self._cold:
                return
            layer = self._next_layer
            if layer in self._staged or not self._stage_layer(layer):
                return

    def _stage_layer(self, layer: int) -> bool:
        needed = self._needed(layer)
        if needed:
            if self._promoter is None:
                raise StateError(Reason.NOT_COMMITTED, "segments are in files and no file tier is open")
            promotions = self._promoter.reserve(needed)
            if promotions is None:
                return False
            self._staged[layer] = self._promoter.start(promotions)
            self.staged_peak = max(self.staged_peak, sum(len(batch.items) for batch in self._staged.values()))
            self._missing.discard(layer)
        self._next_layer = (layer + 1) % self.layers
        return True

    def _rebuild_tables(self) -> None:
        history = self.history
        width = len(history.chunks) + len(history.tail)
        self._grants = np.zeros((2, self.layers, width), np.int64)
        self._verified = [-1] * self.layers
        for layer in range(self.layers):
            self.tables[layer].truncate(0)
            self._enter_layer(layer)
            self._enter(layer, len(history.chunks), [chunk.grants[layer] for chunk in history.tail])

    def _enter_layer(self, layer: int) -> None:
        self._enter(layer, 0, [record.grants[layer] for record in self.history.chunks])

    def _enter(self, layer: int, first: int, grants: Sequence[Grant | None]) -> None:
        table, (slots, generations) = self.tables[layer], self._grants[:, layer]
        self._verified[layer] = -1
        for index, grant in enumerate(grants, first):
            if grant is None:
                # A generation no slot ever has: reading this entry before it is filled is refused.
                slots[index], generations[index] = 0, -1
                table.set(index, self._segment(0))
            elif generations[index] != grant.generation or slots[index] != grant.slot:
                slots[index], generations[index] = grant.slot, grant.generation
                self._put(table, index, grant.slot)

    def _put(self, table: BlockTable, index: int, slot: int) -> None:
        known = self._addresses.get(slot)
        if known is not None and index < len(table):
            table.replace(index, self._segment(slot), known)
        else:
            table.set(index, self._segment(slot))
            self._addresses[slot] = table.address(index)

    def _reset_counters(self) -> None:
        self._moved_bytes = 0
        self._moved_segments = 0
        self._stall_s = 0.0
        self._read_s = 0.0
