"""The reference that the store is compared with: plain records of who holds what, and of what was done to it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kvstrata.cost.credits import Credits
from kvstrata.store.history import History
from kvstrata.store.leases import Lease
from kvstrata.store.promotion import Batch, Promotion
from kvstrata.store.transfer_records import CopyEvent, CopyOrder, TransferOutcome, UnitKey
from kvstrata.store.transfer_state import Waiter
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["BrokenInvariantError", "Flight", "Held", "Line", "Passage", "StaleGrant", "require"]


class BrokenInvariantError(AssertionError):
    """The store did what it must never do."""


def require(holds: bool, what: str, *details: object) -> None:
    """Errors: `BrokenInvariantError` unless `holds`; `details` follow the sentence."""
    if not holds:
        raise BrokenInvariantError(" ".join([what, *map(str, details)]))


@dataclass(eq=False, slots=True)
class Line:
    """A history, with the tokens that were committed to it and the state after each."""

    history: History
    script: int
    start: bytes
    tokens: list[int] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)

    @property
    def last(self) -> bytes:
        """The state after the last row."""
        return self.states[-1] if self.states else self.start


@dataclass(eq=False, slots=True)
class Passage:
    """One backend read. phase: queued, copying or landed. fate: what was done to its completion.
    interrupted: whether that was cut short."""

    queue: TransferQueue
    unit: UnitKey
    generation: int
    nbytes: int
    phase: str = "queued"
    fate: str = ""
    order: CopyOrder | None = None
    event: CopyEvent | None = None
    landed_at: float = math.inf
    interrupted: bool = False
    flights: list[Flight] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits."""
        return any(flight.outcome is None for flight in self.flights)

    @property
    def credits(self) -> Credits:
        """What the read itself holds now."""
        out = self.phase == "copying" or (self.phase == "queued" and self.wanted)
        return Credits(pinned=self.nbytes, link=self.nbytes) if out else Credits()


@dataclass(eq=False, slots=True)
class Flight:
    """One request's interest in a passage. items, batch: of a promotion. fresh: cache generation it was made in."""

    waiter: Waiter
    passage: Passage
    grants: tuple[Grant, ...]
    owners: tuple[Hashable, ...]
    staging: int
    fresh: int
    items: tuple[Promotion, ...] = ()
    batch: Batch | None = None
    cancelled: bool = False
    recycled: bool = False
    outcome: TransferOutcome | None = None

    @property
    def out(self) -> bool:
        """Whether its slots and credits are still out: it waits, or its copier has not acknowledged."""
        return self.outcome is None or self.passage.phase == "copying"


@dataclass(eq=False, slots=True)
class Held:
    """A lease as it should be. ended: revoked, released or found expired. gone: acknowledged."""

    lease: Lease
    expires: float
    slots: list[tuple[MemoryArena, Grant, bytes]]
    readers: list[AbstractContextManager[None]] = field(default_factory=list)
    ended: bool = False

    @property
    def gone(self) -> bool:
        """Whether its slots were given back."""
        return self.ended and not self.readers


@dataclass(frozen=True, slots=True)
class StaleGrant:
    """A reservation that stands no longer: whoever comes with it is too late."""

    arena: MemoryArena
    grant: Grant
    owner: Hashable
