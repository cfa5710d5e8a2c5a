"""What a file tier needs of whoever keeps its directory: an intent before the first byte, a row that publishes.

A chunk is published when its row says so. The file's final name is given and taken only inside a call of the journal,
so that no two processes ever change it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Protocol

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.tiers.chunk_format import Header

__all__ = ["WriteJournal", "WriteOutcome"]


class WriteOutcome(StrEnum):
    """How a write ended; each means that a verified replica of the chunk is now in the tier."""

    WRITTEN = "written"
    ALREADY_PRESENT = "already_present"
    REPLACED = "replaced"


class WriteJournal(Protocol):
    """The directory of one file tier. Safe for several threads and processes; every call blocks."""

    def published(self, chunk: bytes) -> bool:
        """Whether the row of `chunk` says that it is published."""
        ...

    def list(self) -> Iterator[bytes]:
        """Names of all published chunks, in no particular order."""
        ...

    def reserve(self, identity: ChunkIdentity, temporary: str, nbytes: int) -> int:
        """Note the intent to write `nbytes` under the name `temporary`; returns the transaction.

        Errors: `StoreError` with STORE_FULL when the cap would be passed, STORE_BUSY, STORE_READ_ONLY or STORE_IO.
        """
        ...

    def publish(self, transaction: int, header: Header, place: Callable[[bool], WriteOutcome]) -> WriteOutcome:
        """Let `place` give the file its final name and make the row, in one transaction that ends the intent.

        `place` is told whether the row already says that this chunk is published in this layout. Errors: as `reserve`,
        and whatever `place` raises; nothing is published then.
        """
        ...

    def abort(self, transaction: int, identity: ChunkIdentity) -> None:
        """Give the reserved bytes back. A file that was placed without a row goes. Never raises for a broken disk."""
        ...

    def remove(self, chunk: bytes, aside: Callable[[], bool]) -> bool:
        """Take the row of `chunk` out and let `aside` move its file, in one transaction; returns what `aside` did."""
        ...
