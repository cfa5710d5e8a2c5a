"""The plan of a request that may choose rows: layers that choose bring in what was chosen, the others everything."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.capability import FILES, HOST
from kvstrata.errors import Reason, StateError, StoreError
from kvstrata.kernels.block_table import BlockTable
from kvstrata.placement.layer_ahead import LayerAhead
from kvstrata.store.promotion import Batch

__all__ = ["Fetched", "OnDemand"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came in for one layer: bytes from files and from the host tier, and seconds that the model waited."""

    file_bytes: int = 0
    host_bytes: int = 0
    stall_s: float = 0.0

    def read_bytes(self, lower: str) -> tuple[tuple[str, int], ...]:
        """Bytes by tier, where `lower` is the tier below the host."""
        pairs = ((lower, self.file_bytes), (HOST, self.host_bytes))
        return tuple(pair for pair in pairs if pair[1])


class OnDemand(LayerAhead):
    """As `LayerAhead`; in a step with `chosen` layers, nothing is read ahead for those, and `fetch` and `arrive` bring
    in the chunks that are asked for. The memory that the exact plan needs is enough: what was chosen is part of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._chosen: frozenset[int] = frozenset()
        self._demanded: dict[int, list[Batch]] = {}
        self._asked: dict[int, set[bytes]] = {}
        super().__init__(*args, **kwargs)

    def begin_choosing(self, chosen: Collection[int], *rows: int) -> None:
        """As `begin_step`. chosen: layers, without a window, whose rows will be asked for."""
        self._chosen = frozenset(chosen)
        self.begin_step(*rows)

    def before_layer(self, layer: int) -> list[BlockTable]:
        """As in `LayerAhead`; of a chosen layer only what is in the tail, or has been asked for, may be read."""
        if layer not in self._chosen or layer in self._staged:
            return super().before_layer(layer)
        return [tables.layers[layer] for tables in self.tables]

    def fetch(self, layer: int, place: int, chunks: Sequence[int]) -> bool:
        """Begin to bring in chunks of the history at `place`, by their numbers. Does not block for reads.

        `False`, and nothing begun, when slots or queue have no room for them: `arrive` reads them then.
        """
        try:
            return self._begin(layer, place, chunks, make_room=False)
        except StoreError:
            return False

    def _begin(self, layer: int, place: int, chunks: Sequence[int], *, make_room: bool) -> bool:
        history = self.histories[place]
        asked = self._asked.setdefault(layer, set())
        needed = [
            (record, layer)
            for record in dict.fromkeys(history.chunks[index] for index in chunks if index < len(history.chunks))
            if record.grants[layer] is None and record.digest not in asked
        ]
        if not needed or layer in self._staged:
            return True
        if self._promoter is None:
            raise StateError(Reason.NOT_COMMITTED, "segments are in files and no file tier is open")
        promotions = self._promoter.reserve(needed)
        while promotions is None:
            if not make_room:
                return False
            if not self._give_up_ahead(layer):
                raise StateError(Reason.NOT_COMMITTED, f"no slots are free for the chosen segments of layer {layer}")
            promotions = self._promoter.reserve(needed)
        self._demanded.setdefault(layer, []).append(self._promoter.start(promotions))
        asked.update(record.digest for record, _ in needed)
        underway = sum(len(batch.items) for batch in self.batches)
        self.staged_peak = max(self.staged_peak, underway)
        return True

    def arrive(self, layer: int, place: int, chunks: Sequence[int]) -> Fetched:
        """Bring in what is missing of `chunks`, wait for it, and check every slot. Blocks.

        Reads for later layers are given up where their slots are needed. Errors: as `LayerAhead.before_layer`, and
        `StoreError` when the queue does not take the reads; the step must be aborted then.
        """
        self._begin(layer, place, chunks, make_room=True)
        start, nbytes, host = self._clock(), 0, 0
        waiting = self._demanded.get(layer, [])
        while waiting:
            # Taken off the list afterwards: an interrupt while waiting must not lose the slots.
            arrival = waiting[0].finish()
            self._moved_segments += len(waiting[0].items)
            waiting.pop(0)
            nbytes, host = nbytes + arrival.nbytes, host + arrival.host_bytes
            self._read_s += arrival.read_s
        stall = self._clock() - start if nbytes else 0.0
        self._moved_bytes, self._host_bytes = self._moved_bytes + nbytes, self._host_bytes + host
        self._stall_s += stall
        if nbytes:
            for tables, history in zip(self.tables, self.histories, strict=True):
                tables.enter_chunks(history, layer)
        self.tables[place].verified_chunks(layer, chunks)
        return Fetched(nbytes - host, host, stall)

    @property
    def lower(self) -> str:
        """The tier below device and host, by name."""
        return FILES if self._promoter is None else self._promoter.source

    def after_layer(self, layer: int) -> None:
        self._asked.pop(layer, None)
        super().after_layer(layer)

    def abort_step(self) -> None:
        for batches in self._demanded.values():
            for batch in batches:
                with contextlib.suppress(StoreError):
                    batch.abandon()
        self._demanded.clear()
        self._asked.clear()
        super().abort_step()

    @property
    def batches(self) -> list[Batch]:
        """Reads under way that a step is to wait for."""
        return [*super().batches, *(batch for batches in self._demanded.values() for batch in batches)]

    def _stage_layer(self, layer: int) -> bool:
        if layer in self._chosen:
            self._next_layer = (layer + 1) % self.layers
            return True
        return super()._stage_layer(layer)

    def _give_up_ahead(self, layer: int) -> bool:
        """Let go of reads for a layer after `layer`: they are repeated when it comes. `False` when there are none.

        Of those that a plan staged, the ones for the layer that is furthest away; after them, what was asked for.
        """
        if self._staged:
            furthest = list(self._staged)[-1]
            batch = self._staged.pop(furthest)
            with contextlib.suppress(StoreError):
                batch.abandon()
            self._stageable.add(furthest)
            self._next_layer = furthest
            return True
        for other, batches in self._demanded.items():
            if other != layer and batches:
                # All of them, as what was asked for is known by layer.
                while batches:
                    with contextlib.suppress(StoreError):
                        batches[-1].abandon()
                    batches.pop()
                self._asked.pop(other, None)
                return True
        return False
