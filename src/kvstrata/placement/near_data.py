"""Rows of the host tier that are read where they lie: held while they are read, verified once for each allocation."""

from __future__ import annotations

import numpy as np
import torch
from xxhash import xxh3_128_digest

from kvstrata.errors import Reason, StateError
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.tiers.memory import Grant

__all__ = ["HostRows"]


class HostRows:
    """Segments in the host arena of `directory`, lent to one step at a time. Used by one thread."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._verified: dict[int, int] = {}
        self._held: list[Grant] = []

    def has(self, record: ChunkRecord, layer: int) -> bool:
        """Whether a valid copy of the segment lies in the host tier."""
        return self._directory.host is not None and record.valid(record.host, layer)

    def borrow(self, record: ChunkRecord, layer: int) -> torch.Tensor | None:
        """The segment's bytes, uint8, in place until `give_back`; `None` when there is no sound copy.

        Reads the whole segment once for each allocation, to compare its checksum. A copy that does not match is
        revoked.
        """
        arena, grant = self._directory.host, record.host.grants[layer]
        if arena is None or grant is None or not self.has(record, layer):
            return None
        try:
            arena.hold(grant, record.key(layer), self._held)
        except StateError:
            return None
        source = arena.backing.readable(grant.slot)
        if self._verified.get(grant.slot) != grant.generation:
            if xxh3_128_digest(source) != record.host.checksums[layer]:
                self._directory.revoke_host(record, layer)
                return None
            self._verified[grant.slot] = grant.generation
        return torch.from_numpy(np.frombuffer(source, np.uint8))

    def give_back(self) -> None:
        """End all loans."""
        arena = self._directory.host
        while self._held:
            if arena is None:
                raise StateError(Reason.NOT_COMMITTED, "rows of a host tier are held that is not there")
            arena.let_go(self._held[-1], self._held)
