"""Exact decoding with part of the history in files: cold segments come back ahead of the layer that needs them.

A fixed set of chunks stays resident in the layers that read them. The others are read into slots one or two layers
ahead and leave again when their layer is done, so that the memory holds at most `depth` layers of them. Every legal row
enters attention; only its place differs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.method import AnswerClass
from kvstrata.contract.receipts import StepReceipt
from kvstrata.contract.selection_receipts import SelectionReceipt
from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.residency import ResidencyPlan, plan_residency, required_slots
from kvstrata.errors import BudgetError, DamagedError, Reason, StateError, StoreError
from kvstrata.kernels.block_table import BlockTable
from kvstrata.placement.tables import HistoryTables
from kvstrata.ports import Clock
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.history import History
from kvstrata.store.host_cache import HostCache
from kvstrata.store.promotion import Batch, Promoter
from kvstrata.store.publication import Publisher

__all__ = ["LayerAhead"]


class LayerAhead:
    """The exact plan of one request. Used by one thread: begin_step, then before_layer and after_layer for every layer
    in order, then end_step or abort_step.

    histories: those of the request's sequences; chunks that they share are held and read once. `replace` exchanges
    them. tables: of each history. windows: for each layer the tokens that a row sees, its own included, or `None` for
    all. segment: the tensor of a slot, uint8. promoter, publisher: None without a file tier. host: a tier in between,
    or None. budget_for: turns slots into the bytes of a budget that would give that many. depth: layers in flight.
    """

    def __init__(
        self,
        histories: Sequence[History],
        layout: SegmentLayout,
        segment: Callable[[int], torch.Tensor],
        promoter: Promoter | None,
        publisher: Publisher | None,
        budget_for: Callable[[int], int],
        depth: int = 2,
        clock: Clock = time.perf_counter,
        windows: Sequence[int | None] | None = None,
        host: HostCache | None = None,
    ) -> None:
        self.directory: Directory = histories[0].directory
        self.layers = self.directory.layers
        self.dirty = True
        self.windows = tuple(windows) if windows is not None else (None,) * self.layers
        self._distinct = tuple(sorted({window for window in self.windows if window is not None}))
        self._layout = layout
        self._segment = segment
        self._promoter = promoter
        self._publisher = publisher
        self._host = host
        self._budget_for = budget_for
        self._wanted_depth = depth
        self._clock = clock
        self._depth = 0
        self._records: list[ChunkRecord] = []
        self._readers: list[set[int | None]] = []
        self._cold: list[ChunkRecord] = []
        self._stageable: set[int] = set()
        self._staged: dict[int, Batch] = {}
        self._next_layer = 0
        self._planned: tuple[object, ...] | None = None
        self.staged_peak = 0
        self.histories: list[History] = []
        self.tables: list[HistoryTables] = []
        self.replace(histories)
        self._reset_counters(())

    def replace(self, histories: Sequence[History]) -> None:
        """Plan for other histories of the same directory from the next step on."""
        self.abort_step()
        self.histories = list(histories)
        arena = self.directory.arena
        self.tables = self.tables[: len(histories)]
        while len(self.tables) < len(histories):
            self.tables.append(HistoryTables(arena, self.layers, self._layout, self._segment))

    def begin_step(self, *rows: int) -> None:
        """Make room for `rows` more rows of each history and start the first reads. Blocks while chunks must be written
        to make room.

        Errors: `BudgetError` when the tails and one layer's segments do not fit, with the budget that would do;
        `StoreError` when room could only be made by writing, and writing failed.
        """
        self._reset_counters(rows)
        if self.dirty or self._state(rows) != self._planned:
            self._replan(rows)
            self._planned = self._state(rows)
            self.dirty = False
        self._stage()

    def before_layer(self, layer: int) -> list[BlockTable]:
        """The block tables of `layer`, one for each history. Blocks until the cold segments have arrived and been
        verified. Entries of chunks that lie behind the layer's window are not to be read.

        Errors: `DamagedError` or `StoreError` from reading; the step must be aborted then.
        """
        batch = self._staged.get(layer)
        if batch is None and layer in self._stageable:
            if not self._stage_layer(layer):
                raise StateError(Reason.NOT_COMMITTED, f"no slots are free for the cold segments of layer {layer}")
            batch = self._staged.get(layer)
        if batch is not None:
            start = self._clock()
            # Taken off the list afterwards: an interrupt while waiting must not lose the slots.
            arrival = batch.finish()
            del self._staged[layer]
            self._stall_s += self._clock() - start
            self._moved_bytes += arrival.nbytes
            self._host_bytes += arrival.host_bytes
            self._moved_segments += len(batch.items)
            self._read_s += arrival.read_s
            for tables, history in zip(self.tables, self.histories, strict=True):
                tables.enter_chunks(history, layer)
        window = self.windows[layer]
        return [
            tables.verified(layer, self._first_chunk(history, window))
            for tables, history in zip(self.tables, self.histories, strict=True)
        ]

    def after_layer(self, layer: int) -> None:
        """Give the cold segments of `layer` up and start reading for a later layer."""
        for record in self._cold:
            self._evict(record, layer)
        if self._cold or self._staged:
            self._stage()

    def end_step(self, sealed: int, selections: Sequence[SelectionReceipt] = ()) -> StepReceipt:
        """The step's receipt. sealed: chunks that its rows filled. selections: what was left out."""
        chose = [each.answer for each in selections if each.chose]
        size = self.directory.arena.slot_bytes
        row_bytes = size // self._layout.chunk_tokens
        return StepReceipt(
            start=self._start,
            rows=self._rows,
            visible=self._visible,
            resident_bytes=max(0, self._wanted_segments - self._moved_segments) * size
            + self.layers * self._tail_rows * row_bytes,
            moved_bytes=self._moved_bytes,
            moved_segments=self._moved_segments,
            stall_s=self._stall_s,
            read_s=self._read_s,
            sealed=sealed,
            contract=chose[0] if chose else AnswerClass.EXACT,
            host_bytes=self._host_bytes,
            selections=tuple(selections),
        )

    def abort_step(self) -> None:
        """Forget reads under way, after their readers have acknowledged. The next step plans anew."""
        for batch in self._staged.values():
            # A late reader keeps its slots until it acknowledges; the next plan does without them.
            with contextlib.suppress(StoreError):
                batch.abandon()
        self._staged.clear()
        self.dirty = True

    @property
    def batches(self) -> list[Batch]:
        """Reads under way that a step is to wait for."""
        return list(self._staged.values())

    def yield_memory(self) -> None:
        """Give up every slot that another request may use: all segments of which another valid copy is left.

        Blocks while segments are being written or copied.
        """
        self.abort_step()
        for record in self._union():
            if record.file is FileReplicaState.WRITING and self._publisher is not None:
                self._publisher.wait(record)
            if record.evictable or self._demote(record):
                for layer in range(self.layers):
                    self._evict(record, layer)

    def close(self) -> None:
        """End what is under way and let go of the arena's memory."""
        self.abort_step()
        for tables in self.tables:
            tables.close()

    def _state(self, rows: Sequence[int]) -> tuple[object, ...]:
        return tuple(
            (
                len(history.chunks),
                history.tail_chunks_for(count),
                history.version,
                *(self._first_chunk(history, window) for window in self._distinct),
            )
            for history, count in zip(self.histories, rows, strict=True)
        )

    def _first_chunk(self, history: History, window: int | None) -> int:
        """Index of the first chunk that the next row of `history` still sees."""
        if window is None:
            return 0
        return max(0, history.frontier + 1 - window) // self._layout.chunk_tokens

    def _union(self) -> list[ChunkRecord]:
        return list({record.digest: record for history in self.histories for record in history.chunks}.values())

    def _replan(self, rows: Sequence[int]) -> None:
        self.abort_step()
        for history, count in zip(self.histories, rows, strict=True):
            if len(history.tail) > history.tail_chunks_for(count):
                # Slots for a longer step that was cut short: the plan counts on them.
                history.rewind(history.frontier)
        self._records = self._union()
        readers: dict[bytes, set[int | None]] = {record.digest: set() for record in self._records}
        for history in self.histories:
            for window in set(self.windows):
                for record in history.chunks[self._first_chunk(history, window) :]:
                    readers[record.digest].add(window)
        self._readers = [readers[record.digest] for record in self._records]
        tail = sum(history.tail_chunks_for(count) for history, count in zip(self.histories, rows, strict=True))
        own = sum(len(history.tail) for history in self.histories) * self.layers
        own += sum(record.resident for record in self._records)
        kept, plan = self._keep(own, tail)
        self._depth = plan.depth
        self._cold = [
            record
            for record, reading in zip(self._records, self._readers, strict=True)
            if reading and record.digest not in kept
        ]
        self._evict_unread(kept)
        self._stageable = {layer for layer in range(self.layers) if self._needed(layer)}
        pairs = zip(self._records, self._readers, strict=True)
        cold = {window for record, reading in pairs if record.digest not in kept for window in reading}
        self._stageable |= {layer for layer, window in enumerate(self.windows) if window in cold}
        for history, count in zip(self.histories, rows, strict=True):
            if not history.extend_tail(count):
                raise StateError(Reason.NOT_COMMITTED, "the plan promised slots for the tail that are not free")
        for tables, history in zip(self.tables, self.histories, strict=True):
            tables.rebuild(history)
        self._wanted_segments = sum(self._cost(reading) for reading in self._readers)
        self._next_layer = 0

    def _cost(self, reading: set[int | None]) -> int:
        return sum(window in reading for window in self.windows)

    def _keep(self, own: int, tail: int) -> tuple[set[bytes], ResidencyPlan]:
        """Digests of the chunks to keep in memory, and the plan. own: slots that the histories hold now.

        Waits until the chunks that are left out have a valid file replica.
        """
        tried: set[bytes] = set()
        arena, settled = self.directory.arena, self._publisher is None
        while True:
            slots = arena.free_slots + own
            cost = {r.digest: self._cost(reading) for r, reading in zip(self._records, self._readers, strict=True)}
            read = [record for record in self._records if cost[record.digest]]
            # What has no other replica stays in all layers.
            unsafe = [record for record in self._records if not record.evictable]
            safe = sorted((r for r in read if r.evictable), key=lambda record: -record.resident)
            plan = plan_residency(slots, [cost[r.digest] for r in read], tail * self.layers, self._wanted_depth)
            if plan is None and not settled:
                # Slots that were given up in the middle of a write are free when it ends.
                self._stall_s += self._publisher.wait() if self._publisher is not None else 0.0
                settled = True
                continue
            if plan is None:
                self._refuse(len(read), tail, arena.used_slots - own)
            order = [*unsafe, *safe]
            costs = [self.layers] * len(unsafe) + [cost[record.digest] for record in safe]
            plan = plan_residency(slots, costs, tail * self.layers, self._wanted_depth)
            if plan is not None and plan.resident_chunks >= len(unsafe):
                return {record.digest for record in order[: plan.resident_chunks]}, plan
            self._await(unsafe[0], tried)

    def _await(self, record: ChunkRecord, tried: set[bytes]) -> None:
        """Wait until `record` has been written; try it again once where it had failed.

        Where it cannot be written, a copy in the host tier will do.
        """
        if self._publisher is None and self._demote(record):
            return
        if self._publisher is None:
            chunks, tails = len(self._records), sum(len(history.tail) for history in self.histories)
            need = self._budget_for((chunks + tails) * self.layers)
            raise BudgetError(
                Reason.BUDGET_TOO_SMALL,
                f"{chunks} chunks do not fit the memory budget, and no writable store could take them",
                f"open a writable store, or pass budget={need}",
                required_bytes=need,
            )
        if record.file is not FileReplicaState.WRITING:
            self._require_rows(record)
            # An earlier failure may be over by now; one that repeats is the caller's to see.
            if record.digest in tried and self._demote(record):
                return
            if record.digest in tried:
                raise record.failure or StoreError(Reason.STORE_IO, "a chunk could not be written")
            tried.add(record.digest)
            self._publisher.submit(record)
        self._stall_s += self._publisher.wait(record)

    def _require_rows(self, record: ChunkRecord) -> None:
        """Errors: `DamagedError` when some segment has no valid copy anywhere, so that nothing could be written."""
        if not all(self.directory.valid_copies(record, layer) for layer in range(self.layers)):
            name = record.digest.hex()
            raise DamagedError(Reason.CHUNK_MISSING, f"chunk {name[:16]} has no valid copy left", chunk=name)

    def _refuse(self, chunks: int, tail: int, foreign: int) -> NoReturn:
        need = self._budget_for(required_slots(self.layers, chunks, tail) + foreign)
        frontier, rows = sum(history.frontier for history in self.histories), self._rows
        raise BudgetError(
            Reason.BUDGET_TOO_SMALL,
            f"{frontier} tokens and {rows} more need a memory budget of at least {need} bytes: "
            f"{tail} open chunks in {self.layers} layers, and the {chunks} sealed segments of one layer",
            f"pass budget={need} or more, a smaller prefill_chunk, fewer sequences, or a shorter history",
            required_bytes=need,
        )

    def _evict_unread(self, kept: set[bytes]) -> None:
        """Free what no layer reads from memory, as far as a file could bring it back."""
        for record, reading in zip(self._records, self._readers, strict=True):
            if record.evictable:
                for layer, window in enumerate(self.windows):
                    if record.digest not in kept or window not in reading:
                        self._evict(record, layer)

    def _evict(self, record: ChunkRecord, layer: int) -> None:
        """Free the device's slot of one segment, after a copy to the host tier where there is one with room."""
        if self._host is not None and record.grants[layer] is not None:
            self._host.demote(record, layer)
        self.directory.evict(record, layer)

    def _demote(self, record: ChunkRecord) -> bool:
        return self._host is not None and record.resident == self.layers and self._host.demote_whole(record)

    def _needed(self, layer: int) -> list[tuple[ChunkRecord, int]]:
        window = self.windows[layer]
        return [
            (record, layer)
            for record, reading in zip(self._records, self._readers, strict=True)
            if window in reading and record.grants[layer] is None
        ]

    def _stage(self) -> None:
        """Start reads for the coming layers while slots, credits and the planned depth allow."""
        if self._promoter is None or not self._stageable:
            return
        for _ in range(self.layers):
            if len(self._staged) >= self._depth and self._cold:
                return
            layer = self._next_layer
            # Credits that are short now come back when a layer has arrived: what is only ahead can wait for that.
            if layer in self._staged or not self._promoter.affords(self._wanted(layer)) or not self._stage_layer(layer):
                return

    def _wanted(self, layer: int) -> list[tuple[ChunkRecord, int]]:
        return self._needed(layer) if layer in self._stageable else []

    def _stage_layer(self, layer: int) -> bool:
        needed = self._wanted(layer)
        if needed:
            if self._promoter is None:
                raise StateError(Reason.NOT_COMMITTED, "segments are in files and no file tier is open")
            promotions = self._promoter.reserve(needed)
            if promotions is None:
                return False
            self._staged[layer] = self._promoter.start(promotions)
            self.staged_peak = max(self.staged_peak, sum(len(batch.items) for batch in self._staged.values()))
            if not self._cold:
                self._stageable.discard(layer)
        self._next_layer = (layer + 1) % self.layers
        return True

    def _reset_counters(self, rows: Sequence[int]) -> None:
        active = [(history, count) for history, count in zip(self.histories, rows, strict=False) if count]
        self._rows = sum(count for _, count in active)
        self._start = active[0][0].frontier if active else 0
        self._visible = sum(history.frontier + count for history, count in active)
        self._tail_rows = sum(history.frontier - history.sealed + count for history, count in active)
        self._moved_bytes = 0
        self._host_bytes = 0
        self._moved_segments = 0
        self._stall_s = 0.0
        self._read_s = 0.0
