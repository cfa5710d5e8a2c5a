"""Reading every chunk of a file tier once, to tell what is sound and why the rest is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.files import FileTier

__all__ = ["ChunkVerdict", "verify_chunks"]


@dataclass(frozen=True, slots=True)
class ChunkVerdict:
    """The outcome for one chunk: payload `bytes` read, and `reason` with `cause` unless it is sound."""

    chunk: bytes
    bytes: int
    reason: Reason | None = None
    cause: str = ""

    @property
    def sound(self) -> bool:
        """Whether header, every segment and the tenant's payload digest are right."""
        return self.reason is None


def verify_chunks(
    tier: FileTier, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[ChunkVerdict]:
    """Verify each chunk in the order of its name; calls `progress(done, total)` in chunks. Changes nothing; blocks."""
    chunks = sorted(tier.list())
    for done, chunk in enumerate(chunks, 1):
        try:
            with tier.open(chunk) as file:
                verdict = ChunkVerdict(chunk, file.verify_payload().bytes)
        except StoreError as error:
            verdict = ChunkVerdict(chunk, 0, error.reason, error.cause)
        progress(done, len(chunks))
        yield verdict
