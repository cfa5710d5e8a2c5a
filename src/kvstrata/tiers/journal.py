"""What a file tier needs of whoever keeps its directory: an intent before the first byte, a row that publishes.

A chunk is published when its row says so. The file's final name is given and taken only inside a call of the journal,
so that no two processes ever change it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.tiers.chunk_format import Header

__all__ = ["Intent", "WriteJournal", "WriteOutcome"]


class WriteOutcome(StrEnum):
    """How a write ended; each means that a verified replica of the chunk is now in the tier."""

    WRITTEN = "written"
    ALREADY_PRESENT = "already_present"
    REPLACED = "replaced"


class Intent(NamedTuple):
    """A chunk that is to be written under the name `temporary`, and the bytes that its file will take."""

    identity: ChunkIdentity
    temporary: str
    nbytes: int


class WriteJournal(Protocol):
    """The directory of one file tier. Safe for several threads and processes; every call blocks."""

    def published(self, chunk: bytes) -> bool:
        """Whether the row of `chunk` says that it is published."""
        ...

    def list(self) -> Iterator[bytes]:
        """Names of all published chunks, in no particular order."""
        ...

    def reserve(self, intents: Sequence[Intent]) -> Sequence[int]:
        """Note what is to be written, all of it or nothing; returns a number for each, which ends it.

        Errors: `StoreError` with STORE_FULL when the cap would be passed, STORE_BUSY, STORE_READ_ONLY or STORE_IO.
        """
        ...

    def publish(
        self,
        written: Sequence[tuple[int, Header]],
        place: Callable[[Sequence[bool]], Sequence[WriteOutcome]],
    ) -> Sequence[WriteOutcome]:
        """Let `place` give the files their final names and make the rows, in one transaction that ends the intents.

        `place` is told of each whether its row already says that it is published in this layout. Errors: as `reserve`,
        and whatever `place` raises; nothing is published then.
        """
        ...

    def abort(self, intents: Sequence[tuple[int, ChunkIdentity]]) -> None:
        """Give the reserved bytes back. Files that were placed without a row go. Never raises for a broken disk."""
        ...

    def remove(self, chunk: bytes, aside: Callable[[], bool]) -> bool:
        """Take the row of `chunk` out and let `aside` move its file, in one transaction; returns what `aside` did."""
        ...
