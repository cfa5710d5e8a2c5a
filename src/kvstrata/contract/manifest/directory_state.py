"""The replicas of chunks at one moment, as a record: which are valid, and whose survival prevents loss."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from kvstrata.contract.identity import Namespace

__all__ = ["ChunkState", "DirectoryState", "ReplicaState"]


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One copy of a chunk.

    generation: publication lifetime of this copy. epoch: authority epoch under which it was validated. layout, payload:
    hexadecimal digests, the payload's keyed with the tenant; empty where not known. published: it may be read.
    whole: it has every layer. allocations: allocation generation of its slot in each layer, `None` where that layer is
    not there; empty in tiers without slots.
    """

    tier: str
    generation: int
    epoch: int
    codec: str
    layout: str
    tenant: Namespace
    payload: str
    published: bool
    whole: bool
    allocations: tuple[int | None, ...] = ()

    def holds(self, layer: int) -> bool:
        """Whether rows of `layer` may be read here."""
        return self.published and (not self.allocations or self.allocations[layer] is not None)


@dataclass(frozen=True, slots=True)
class ChunkState:
    """The copies of rows [start, stop), under the authority of the one in the tier `authority`."""

    chunk: str
    start: int
    stop: int
    epoch: int
    authority: str
    replicas: tuple[ReplicaState, ...]

    def replica(self, tier: str) -> ReplicaState | None:
        """The copy in `tier`."""
        return next((replica for replica in self.replicas if replica.tier == tier), None)

    @property
    def valid_replicas(self) -> int:
        """Whole copies that are published under the current epoch: those that count for survival."""
        return sum(replica.published and replica.whole and replica.epoch == self.epoch for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """The directory at `generation`. survivors: valid copies that each chunk needs at least."""

    generation: int
    survivors: int
    chunks: tuple[ChunkState, ...]

    def chunk_at(self, position: int) -> ChunkState | None:
        """The chunk that holds `position`; chunks are in the order of their positions."""
        found = bisect_right(self.chunks, position, key=lambda chunk: chunk.start) - 1
        return self.chunks[found] if found >= 0 and position < self.chunks[found].stop else None
