"""Reads through a transfer queue whose tier and acknowledgements fail on purpose, one step at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_128

from kvstrata.cost.credits import Credits
from kvstrata.store.buffers import used_pages
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.destinations import SlotDestination
from kvstrata.store.segment_copier import OpenedEachTime, SegmentCopier
from kvstrata.store.transfer_records import Refusal, SegmentSource, UnitKey
from kvstrata.store.transfer_state import Waiter
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.fault_plan import FaultInjector
from kvstrata.tiers.faulty import FaultyDelivery, FaultyTier
from kvstrata.tiers.files import payload_bytes
from kvstrata.tiers.memory import HostBacking, MemoryArena

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.contract.layout import SegmentLayout
    from kvstrata.lab.chaos import KnownChunk

__all__ = ["ChaosReader", "EndedRead"]

_SLOTS = 12


@dataclass(frozen=True, slots=True)
class EndedRead:
    """How one request ended. rows: checksums of what was published, or `None`."""

    outcome: str
    rows: list[bytes] | None = None


class ChaosReader:
    """One queue with ample credits, and an arena for each layout."""

    def __init__(self, tier: FaultyTier, injector: FaultInjector) -> None:
        everything = 1 << 40
        self._pool = CreditPool(Credits(everything, everything, everything, 8))
        self._delivery = FaultyDelivery(injector)
        copier = SegmentCopier(OpenedEachTime(tier))
        self._queue = TransferQueue("files -> host", self._pool, copier, deliver=self._delivery)
        self._arenas: dict[SegmentLayout, MemoryArena] = {}

    def read(self, known: KnownChunk, layers: Sequence[int], source: random.Random) -> list[EndedRead]:
        """Ask for the layers once or twice, give up now and then, and wait for the rest. Slots are given back."""
        layout, context = known.layout, known.identity.context
        if layout not in self._arenas:
            size = layout.segment_bytes
            self._arenas[layout] = MemoryArena(size, HostBacking(size, _SLOTS))
        arena = self._arenas[layout]
        segments = tuple(SegmentSource(known.identity.digest, layer) for layer in layers)
        unit = UnitKey(context.namespace, context.digest, segments, layout, "files")
        nbytes = len(layers) * payload_bytes(layout, len(known.identity.token_ids))
        waiters: list[Waiter] = []
        for number in range(source.choice([1, 1, 2])):
            owners = [(number, segment) for segment in segments]
            grants = [grant for owner in owners if (grant := arena.reserve(owner)) is not None]
            answer = self._queue.submit(unit, nbytes, SlotDestination(arena, grants, owners))
            assert not isinstance(answer, Refusal)
            waiters.append(answer)
        if source.random() < 0.1:
            source.choice(waiters).cancel()
        while self._queue.run_one():
            pass
        self._delivery.flush()
        return [self._end(waiter, known) for waiter in waiters]

    def leaked(self) -> str:
        """What is out between two reads, when nothing may be; or the empty string."""
        slots = sum(arena.used_slots for arena in self._arenas.values())
        if self._pool.outstanding or self._pool.free != self._pool.total:
            return f"credits leaked: {self._pool.reserved}"
        return f"{slots} slots leaked" if slots else ""

    def _end(self, waiter: Waiter, known: KnownChunk) -> EndedRead:
        result = waiter.poll()
        if result is None:
            return EndedRead("a waiter waits for ever")
        if not result.ready:
            return EndedRead(str(result.error.reason) if result.error is not None else str(result.outcome))
        place = waiter.destination
        assert isinstance(place, SlotDestination)
        rows = []
        for grant in place.grants:
            hasher = xxh3_128()
            view = place.arena.backing.readable(grant.slot)
            for part in used_pages(view, known.layout, len(known.identity.token_ids)):
                hasher.update(part)
            rows.append(hasher.digest())
            place.arena.release(grant)
        return EndedRead("ready", rows)
