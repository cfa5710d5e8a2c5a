"""Where gathered rows go: slots of an arena, made visible by numbered events."""

from __future__ import annotations

import threading

from kvstrata.errors import BudgetError, Reason
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["GatherDestination"]


class GatherDestination:
    """Slots for gathered rows, all K of one head before all V. Thread-safe; no call blocks but for `publish`.

    arena: its slots; one gather takes one. tier: its name in the capability records. event: number of the last event
    before the first one here.
    """

    def __init__(self, arena: MemoryArena, tier: str, *, event: int = 0) -> None:
        self.arena = arena
        self.tier = tier
        self._event = event
        self._events = [event] * arena.slots
        self._lock = threading.Lock()

    def reserve(self, owner: str, size: int) -> Grant:
        """A slot for `size` bytes. Errors: `BudgetError` when no slot is free or none is large enough."""
        grant = self.arena.reserve(owner) if size <= self.arena.slot_bytes else None
        if grant is None:
            raise BudgetError(
                Reason.BUDGET_TOO_SMALL,
                f"{size} bytes of gathered rows find no room: {self.arena.free_slots} of {self.arena.slots} slots of "
                f"{self.arena.slot_bytes} bytes are free",
                "release gathered rows that were used, gather fewer at once, or give the destination more memory",
                required_bytes=max(size, self.arena.slot_bytes) * (self.arena.used_slots + 1),
            )
        return grant

    def publish(self, grant: Grant, owner: str) -> int:
        """Make the filled slot visible; returns the number of the event that did. Blocks until it is.

        Errors: `StateError` if the slot has another owner or generation by now.
        """
        self.arena.backing.flush(grant.slot)
        self.arena.publish(grant, owner)
        with self._lock:
            self._event += 1
            self._events[grant.slot] = self._event
            return self._event

    def allocation(self, slot: int) -> int:
        """Allocation generation of a slot now; -1 for a slot that does not exist."""
        return int(self.arena.generations[slot]) if 0 <= slot < self.arena.slots else -1

    def event(self, slot: int) -> int:
        """The event that made the slot visible last; -1 for a slot that does not exist."""
        return self._events[slot] if 0 <= slot < self.arena.slots else -1
