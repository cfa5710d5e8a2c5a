"""Generations of one proxy or one index: reserved, written, validated, published, retired, reclaimed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

from kvstrata.contract.manifest import DeletionReceipt
from kvstrata.contract.states import SNAPSHOT, SnapshotState
from kvstrata.errors import Reason, StateError

__all__ = ["ReclaimOutcome", "Snapshot", "SnapshotLine"]

Publication = TypeVar("Publication")


class ReclaimOutcome(StrEnum):
    """What became of a wish to reclaim. Only RECLAIMED has given anything back; the others may be tried again.

    LOOKUP_IN_FLIGHT: a look-up that may refer to it has not ended. READER_LEFT: a lease on it has ended, but its reader
    has not acknowledged. STILL_SERVING: neither a newer generation nor a tombstone hides it yet. BUILT_UPON: an index
    stands on it. DELETION_NOT_DURABLE: there is no receipt that says that no crash brings it back.
    """

    RECLAIMED = "reclaimed"
    LOOKUP_IN_FLIGHT = "lookup_in_flight"
    READER_LEFT = "reader_left"
    STILL_SERVING = "still_serving"
    BUILT_UPON = "built_upon"
    DELETION_NOT_DURABLE = "deletion_not_durable"


class Snapshot(Generic[Publication]):
    """One generation. publication: what it is, once written. payload: the method's own object; the store never looks
    into it."""

    __slots__ = ("generation", "payload", "publication", "state")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.state = SnapshotState.RESERVED
        self.publication: Publication | None = None
        self.payload: object = None

    @property
    def record(self) -> Publication:
        """What it is. Errors: `StateError` before it is written."""
        if self.publication is None:
            raise StateError(
                Reason.SNAPSHOT_NOT_PUBLISHED, f"generation {self.generation} is {self.state}, and holds nothing yet"
            )
        return self.publication

    def move(self, state: SnapshotState) -> None:
        """Errors: `StateError` for an illegal transition."""
        self.state = SNAPSHOT.require(self.state, state)


class SnapshotLine(Generic[Publication]):
    """The generations of one proxy or index, of which one at most is published. Thread-safe; no call blocks.

    name: of the proxy or index. generation: the last number before the first one here.
    """

    def __init__(self, name: str, *, generation: int = 0) -> None:
        self.name = name
        self.lock = threading.RLock()
        self._last = generation
        self._alive: dict[int, Snapshot[Publication]] = {}
        self._published: Snapshot[Publication] | None = None

    @property
    def published(self) -> Snapshot[Publication] | None:
        """The one that new look-ups read."""
        return self._published

    def find(self, generation: int) -> Snapshot[Publication] | None:
        """A generation that has not been reclaimed."""
        return self._alive.get(generation)

    def written(self) -> list[Snapshot[Publication]]:
        """All generations that hold something and have not been reclaimed."""
        with self.lock:
            return [snapshot for snapshot in self._alive.values() if snapshot.publication is not None]

    def reserve(self) -> Snapshot[Publication]:
        """The next generation; nobody sees it."""
        with self.lock:
            self._last += 1
            snapshot = self._alive[self._last] = Snapshot[Publication](self._last)
            return snapshot

    def write(self, snapshot: Snapshot[Publication], publication: Publication, payload: object) -> None:
        """Note what was built; nobody sees it yet. Errors: `StateError` for an illegal transition."""
        with self.lock:
            snapshot.move(SnapshotState.WRITTEN)
            snapshot.publication, snapshot.payload = publication, payload

    def publish(self, snapshot: Snapshot[Publication], validate: Callable[[], None]) -> None:
        """Validate and publish; the generation before it takes no new reader from then on.

        Errors: what `validate` raises, with nothing published; `StateError` for an illegal transition.
        """
        with self.lock:
            validate()
            snapshot.move(SnapshotState.VALIDATED)
            snapshot.move(SnapshotState.PUBLISHED)
            before, self._published = self._published, snapshot
            if before is not None:
                before.move(SnapshotState.RETIRED)

    def tombstone(self) -> None:
        """Take the published generation out of use with none to follow it."""
        with self.lock:
            if self._published is not None:
                self._published.move(SnapshotState.RETIRED)
                self._published = None

    def abandon(self, snapshot: Snapshot[Publication]) -> None:
        """Give up a generation that was never published. Errors: `StateError` if it was."""
        with self.lock:
            snapshot.move(SnapshotState.RECLAIMED)
            self._drop(snapshot)

    def reclaim(
        self,
        snapshot: Snapshot[Publication],
        obstacle: Callable[[], ReclaimOutcome | None],
        delete: Callable[[], DeletionReceipt],
    ) -> ReclaimOutcome:
        """Delete a retired generation once nothing refers to it.

        obstacle: who still does. delete: removes it where it is kept; called only when nothing refers to it any more.
        """
        with self.lock:
            if snapshot.state is not SnapshotState.RETIRED:
                return ReclaimOutcome.STILL_SERVING
            found = obstacle()
            if found is not None:
                return found
            if not delete().durable:
                return ReclaimOutcome.DELETION_NOT_DURABLE
            snapshot.move(SnapshotState.RECLAIMED)
            self._drop(snapshot)
            return ReclaimOutcome.RECLAIMED

    def _drop(self, snapshot: Snapshot[Publication]) -> None:
        self._alive.pop(snapshot.generation, None)
        snapshot.payload = None
