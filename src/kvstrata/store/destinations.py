"""Where a transfer ends: reserved slots that are nobody else's until they are published or given back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from kvstrata.contract.states import SlotState
from kvstrata.store.transfer_records import TransferOutcome
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["Destination", "SlotDestination"]


class Destination(Protocol):
    """What the queue needs of a destination, which is the queue's from admission until `publish` or `release` returned.

    nbytes: staging that it takes. No call blocks on I/O.
    """

    @property
    def nbytes(self) -> int: ...

    def check(self) -> TransferOutcome:
        """READY while everything is as it was reserved, else what changed."""
        ...

    def publish(self) -> None:
        """Make it readable. May be called again after an interruption. Errors: `StateError` when it cannot be."""
        ...

    def release(self) -> None:
        """Give back whatever was not published. May be called again after an interruption."""
        ...


class SlotDestination:
    """Slots of an arena. `grants[i]` was reserved for `owners[i]`.

    fresh: whether the cache is still in the generation for which the slots were reserved. publish_slot(i): what makes
    slot i readable, e.g. `Directory.publish`, which also checks owner and generation; without it the arena publishes.
    """

    __slots__ = ("_fresh", "_publish_slot", "_published", "arena", "grants", "nbytes", "owners")

    def __init__(
        self,
        arena: MemoryArena,
        grants: Sequence[Grant],
        owners: Sequence[Hashable],
        *,
        fresh: Callable[[], bool] | None = None,
        publish_slot: Callable[[int], None] | None = None,
    ) -> None:
        assert len(grants) == len(owners)
        self.arena = arena
        self.grants = tuple(grants)
        self.owners = tuple(owners)
        self.nbytes = len(self.grants) * arena.slot_bytes
        self._fresh = fresh
        self._publish_slot = publish_slot
        self._published = 0

    def check(self) -> TransferOutcome:
        """Compare cache generation, then allocation generation and owner of every slot."""
        if self._fresh is not None and not self._fresh():
            return TransferOutcome.STALE_CACHE_GENERATION
        index = self.arena.first_stale(self.grants, self.owners)
        if index is not None:
            grant = self.grants[index]
            current = self.arena.generations[grant.slot] == grant.generation
            return TransferOutcome.IDENTITY_MISMATCH if current else TransferOutcome.RECYCLED_DESTINATION
        return TransferOutcome.READY

    def publish(self) -> None:
        while self._published < len(self.grants):
            if self._publish_slot is not None:
                self._publish_slot(self._published)
            else:
                self.arena.publish(self.grants[self._published], self.owners[self._published])
            self._published += 1

    def release(self) -> None:
        for grant, owner in zip(self.grants, self.owners, strict=True):
            if self.arena.belongs(grant, owner) and self.arena.state(grant.slot) is SlotState.RESERVED:
                self.arena.release(grant)
