"""A memory tier: an arena of equal slots under a hard byte budget.

A slot holds one segment. It is reserved, filled, published and released, in that order; every reservation gets a new
allocation generation, so that a late writer or reader of the previous owner is told apart (the ABA problem). A slot
that its owner gives up while a reader or transfer still holds it becomes free only after the last of them has let go.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.contract.capability import HOST, Persistence, TierCapability, Visibility
from kvstrata.contract.states import SLOT, SlotState
from kvstrata.errors import ConfigurationError, Reason, StateError

__all__ = ["HOST_MEMORY", "Backing", "Grant", "HostBacking", "MemoryArena"]

_ALIGNMENT = 4096
# An attribute of an enum's class costs as much as a call, and segments come by the thousand.
_FREE, _RESERVED, _PUBLISHED = SlotState.FREE, SlotState.RESERVED, SlotState.PUBLISHED

HOST_MEMORY = TierCapability(
    HOST,
    "host",
    kernel_readable=False,
    dma_source=True,
    dma_destination=True,
    persistence=Persistence.PROCESS,
    visibility=Visibility.WRITE,
    alignment=_ALIGNMENT,
)
"""What the host's memory can do: an arena of its own, or the buffers through which other tiers reach a device."""


class Grant(NamedTuple):
    """A reservation: the slot, and the generation that makes this reservation different from any other of it."""

    slot: int
    generation: int


class Backing(Protocol):
    """The bytes behind an arena, on whatever device they lie."""

    @property
    def slots(self) -> int:
        """Slots that the memory holds."""

    def readable(self, slot: int) -> memoryview:
        """The slot's bytes in host memory, valid until the next call for this slot. May block on a copy."""

    def writable(self, slot: int) -> memoryview:
        """Host memory to be filled with the slot's new bytes; `flush` makes them visible to kernels."""

    def flush(self, slot: int) -> None:
        """Make bytes written through `writable` visible on the device. Blocks until they are."""

    def close(self) -> None:
        """Give the memory back."""


class HostBacking:
    """Anonymous host memory. Pages are taken from the system when they are first written, and never before."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slots = slots
        self.stride = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self.memory: mmap.mmap | None = mmap.mmap(-1, max(1, self.stride * slots))
        view = memoryview(self.memory)
        self._views = [view[i * self.stride : i * self.stride + slot_bytes] for i in range(slots)]

    def readable(self, slot: int) -> memoryview:
        return self._views[slot]

    def writable(self, slot: int) -> memoryview:
        return self._views[slot]

    def flush(self, slot: int) -> None:
        """Nothing to do: the host's memory is the device's."""

    def close(self) -> None:
        """The memory goes with the last view of it that somebody else holds."""
        self._views.clear()
        self.memory = None


class MemoryArena:
    """Slots, their generations and who holds them. Thread-safe; no call blocks but for the zeroing.

    slot_bytes: payload of one slot. backing: where the bytes are. generations: of every slot. epoch: moves whenever any
    generation does, so that an unchanged epoch vouches for all of them. wipe: a slot is zeroed before it is free again.
    generation: where the slots' generations start.
    """

    def __init__(self, slot_bytes: int, backing: Backing, *, wipe: bool = False, generation: int = 0) -> None:
        if slot_bytes <= 0:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"slot_bytes={slot_bytes} must be positive")
        self.slot_bytes = slot_bytes
        self.backing = backing
        self.slots = backing.slots
        self.wipe = wipe
        self.generations: npt.NDArray[np.int64] = np.full(self.slots, generation, np.int64)
        self.epoch = 0
        self._generation = [generation] * self.slots
        self._states = [_FREE] * self.slots
        self._owners: list[Hashable | None] = [None] * self.slots
        self._holders = [0] * self.slots
        self._free = list(range(self.slots - 1, -1, -1))
        self._lock = threading.Lock()
        self.peak_slots = 0

    @property
    def free_slots(self) -> int:
        """Slots that a reservation could get now."""
        return len(self._free)

    @property
    def used_slots(self) -> int:
        """Slots reserved, published or retired."""
        return self.slots - len(self._free)

    def reserve(self, owner: Hashable) -> Grant | None:
        """Take a free slot for `owner` (a segment's key), or `None` when every slot is taken."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._states[slot] = SLOT.require(self._states[slot], _RESERVED)
            self._owners[slot] = owner
            used = self.slots - len(self._free)
            if used > self.peak_slots:
                self.peak_slots = used
            return Grant(slot, self._advance(slot))

    def publish(self, grant: Grant, owner: Hashable) -> None:
        """Make a filled slot readable. Errors: `StateError` if the slot has another owner or generation by now."""
        with self._lock:
            slot = grant.slot
            if self._generation[slot] != grant.generation or self._owners[slot] != owner:
                self._check(grant, owner)
            self._states[slot] = SLOT.require(self._states[slot], _PUBLISHED)

    def rename(self, grant: Grant, owner: Hashable, new_owner: Hashable) -> None:
        """Pass a slot on to the name its rows get when they are sealed. Errors: as `publish`."""
        with self._lock:
            self._check(grant, owner)
            self._owners[grant.slot] = new_owner

    def belongs(self, grant: Grant, owner: Hashable) -> bool:
        """Whether the reservation still stands and is `owner`'s."""
        with self._lock:
            slot = grant.slot
            stands = self._generation[slot] == grant.generation and self._states[slot] is not _FREE
            return stands and self._owners[slot] == owner

    def owner(self, grant: Grant) -> Hashable | None:
        """Whose reservation it is, or `None` once it stands no longer."""
        with self._lock:
            return self._owners[grant.slot] if self._generation[grant.slot] == grant.generation else None

    def first_stale(self, grants: Sequence[Grant], owners: Sequence[Hashable]) -> int | None:
        """Index of the first reservation for which `belongs` would be false, or `None` when all of them stand."""
        generation, owned = self._generation, self._owners
        with self._lock:
            for index, (slot, wanted) in enumerate(grants):
                if generation[slot] != wanted or owned[slot] != owners[index]:
                    return index
            return None

    def hold(self, grant: Grant, owner: Hashable, loans: list[Grant] | None = None) -> None:
        """Keep the slot's bytes in place until `let_go`, whatever its owner does. Errors: as `publish`.

        loans: the holder's account, which gets the grant whatever interrupts the call.
        """
        with self._lock:
            self._check(grant, owner)
            holders, account = self._holders[grant.slot] + 1, [] if loans is None else loans
            # Signals are not served between these stores.
            self._holders[grant.slot], account[len(account) :] = holders, (grant,)

    def let_go(self, grant: Grant, loans: list[Grant] | None = None) -> None:
        """Acknowledge the end of a `hold`; frees a retired slot with its last holder.

        loans: the holder's account, whose last entry is the grant and leaves it.
        """
        with self._lock:
            slot = grant.slot
            if self._generation[slot] != grant.generation or not self._holders[slot]:
                raise StateError(Reason.NOT_COMMITTED, f"slot {slot} is not held in generation {grant.generation}")
            holders, account = self._holders[slot] - 1, [] if loans is None else loans
            # Signals are not served between these stores.
            self._holders[slot], account[-1:] = holders, ()
            if self._states[slot] is SlotState.RETIRED and not self._holders[slot]:
                self._free_slot(slot)

    def release(self, grant: Grant) -> None:
        """Give the slot up; it is free at once, or after its last holder has let go. Errors: `StateError` if stale."""
        with self._lock:
            slot = grant.slot
            if self._generation[slot] != grant.generation or self._states[slot] is _FREE:
                raise StateError(
                    Reason.NOT_COMMITTED, f"slot {slot} was released before, in generation {grant.generation}"
                )
            if self._holders[slot]:
                self._move(slot, SlotState.RETIRED)
            else:
                self._free_slot(slot)

    def reclaim(self, known: Collection[Grant]) -> int:
        """Take back every slot that no grant in `known` stands for; returns how many. Held ones are free once they are
        let go.

        For after an interruption, which may come between the taking of a slot and the noting of it. `known` must name
        every grant that anybody still uses.
        """
        with self._lock:
            free, found = set(self._free), 0
            for slot, state in enumerate(self._states):
                if state is _FREE and slot not in free:
                    if self.wipe:
                        self._zero(slot)
                    self._owners[slot] = None
                    self._advance(slot)
                    self._free.append(slot)
                elif state is not _FREE and Grant(slot, self._generation[slot]) not in known:
                    if not self._holders[slot]:
                        self._free_slot(slot)
                    elif state is not SlotState.RETIRED:
                        self._move(slot, SlotState.RETIRED)
                    else:
                        continue
                else:
                    continue
                found += 1
            return found

    def state(self, slot: int) -> SlotState:
        """Where the slot is in its life."""
        return self._states[slot]

    def close(self) -> None:
        """Give the memory back. Slots must not be used afterwards."""
        if self.wipe:
            with self._lock:
                for slot in set(range(self.slots)).difference(self._free):
                    self._zero(slot)
        self.backing.close()

    def _check(self, grant: Grant, owner: Hashable) -> None:
        slot = grant.slot
        if self._generation[slot] != grant.generation:
            raise StateError(
                Reason.NOT_COMMITTED, f"slot {slot} is in generation {self._generation[slot]}, not {grant.generation}"
            )
        if self._states[slot] is _FREE or self._owners[slot] != owner:
            raise StateError(Reason.NOT_COMMITTED, f"slot {slot} does not belong to {owner!r}")

    def _move(self, slot: int, state: SlotState) -> None:
        self._states[slot] = SLOT.require(self._states[slot], state)

    def _free_slot(self, slot: int) -> None:
        if self.wipe:
            self._zero(slot)
        self._move(slot, _FREE)
        self._owners[slot] = None
        # The generation moves on release as well, so that a table entry of the old owner never looks current.
        self._advance(slot)
        self._free.append(slot)

    def _zero(self, slot: int) -> None:
        self.backing.writable(slot)[:] = bytes(self.slot_bytes)
        self.backing.flush(slot)

    def _advance(self, slot: int) -> int:
        generation = self._generation[slot] + 1
        self._generation[slot] = self.generations[slot] = generation
        self.epoch += 1
        return generation
