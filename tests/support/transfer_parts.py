"""Parts for tests of transfers: a clock that stands still, units, slots, and copiers that do as they are told."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunks_and_faults import LAYOUT

from kvstrata.contract.identity import Namespace
from kvstrata.cost.credits import Credits
from kvstrata.errors import StoreError
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.destinations import Destination, SlotDestination
from kvstrata.store.transfer_records import CopyEvent, CopyOrder, SegmentSource, UnitKey
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.memory import Grant, HostBacking, MemoryArena

SIZE = LAYOUT.segment_bytes


class StandingClock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_unit(number: int = 0, count: int = 1, **changes: Any) -> UnitKey:
    """A unit of `count` layers of one chunk; `changes` replace its fields."""
    parts: dict[str, Any] = {
        "namespace": Namespace("default"),
        "context": b"context",
        "segments": tuple(SegmentSource(bytes([number]) * 32, layer) for layer in range(count)),
        "layout": LAYOUT,
        "source": "files",
    }
    return UnitKey(**(parts | changes))


def pattern(unit: UnitKey, index: int) -> bytes:
    """What segment `index` of a unit holds at its source."""
    segment = unit.segments[index]
    return bytes([(segment.chunk[0] * 16 + segment.layer + 1) % 251]) * SIZE


@dataclass
class PatternCopier:
    """Writes each segment's pattern, unless `answers` holds something else for the next read: an event's changes, or
    an exception to raise."""

    answers: list[dict[str, Any] | BaseException] = field(default_factory=list)
    orders: list[CopyOrder] = field(default_factory=list)
    copies: int = 0

    def read(self, order: CopyOrder) -> CopyEvent:
        self.orders.append(order)
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, BaseException):
            raise answer
        self.fill(order)
        return done(order, **answer)

    def fill(self, order: CopyOrder) -> None:
        target = order.into
        assert isinstance(target, SlotDestination)
        for index, grant in enumerate(target.grants):
            target.arena.backing.writable(grant.slot)[:] = pattern(order.unit, index)

    def duplicate(self, source: Destination, target: Destination) -> None:
        assert isinstance(source, SlotDestination)
        assert isinstance(target, SlotDestination)
        self.copies += 1
        for origin, copy in zip(source.grants, target.grants, strict=True):
            target.arena.backing.writable(copy.slot)[:] = source.arena.backing.readable(origin.slot)


def done(order: CopyOrder, **changes: Any) -> CopyEvent:
    """A whole and right acknowledgement, with `changes`."""
    parts: dict[str, Any] = {"bytes_completed": order.nbytes, "layout": order.unit.layout, "codec": order.unit.codec}
    return CopyEvent(order.generation, **(parts | changes))


class Bench:
    """A queue on a standing clock over an arena of `slots`, with ample credits unless `credits` says otherwise."""

    def __init__(self, slots: int = 8, credits: Credits | None = None, **options: Any) -> None:  # noqa: A002
        self.clock = StandingClock()
        self.arena = MemoryArena(SIZE, HostBacking(SIZE, slots))
        self.pool = CreditPool(credits or Credits(100 * SIZE, 100 * SIZE, 100 * SIZE, 100))
        self.copier = options.pop("copier", None) or PatternCopier()
        options.setdefault("clock", self.clock)
        self.queue = TransferQueue("files -> device", self.pool, self.copier, **options)

    def place(self, owners: Sequence[Hashable] = ("owner",), **options: Any) -> SlotDestination:
        grants: list[Grant] = []
        for owner in owners:
            grant = self.arena.reserve(owner)
            assert grant is not None
            grants.append(grant)
        return SlotDestination(self.arena, grants, owners, **options)

    def submit(self, number: int = 0, place: SlotDestination | None = None, **options: Any) -> Any:
        place = place or self.place()
        unit = options.pop("unit", None) or make_unit(number, len(place.grants))
        return self.queue.submit(unit, len(place.grants) * SIZE, place, **options)

    def start(self) -> CopyOrder:
        order = self.queue.start()
        assert order is not None
        return order

    def balanced(self, published: int = 0) -> bool:
        """No credit, transfer or slot is out, apart from `published` slots."""
        return (
            not self.pool.outstanding
            and self.pool.free == self.pool.total
            and not self.queue.book.waiters
            and not self.queue.book.transfers
            and not self.queue.book.copying
            and not self.queue.book.open
            and self.arena.used_slots == published
        )


def holds(place: SlotDestination, unit: UnitKey) -> bool:
    """Whether the destination holds the unit's bytes."""
    backing = place.arena.backing
    return all(bytes(backing.readable(grant.slot)) == pattern(unit, i) for i, grant in enumerate(place.grants))


def store_error(reason: Any, cause: str = "cause") -> StoreError:
    return StoreError(reason, cause)
