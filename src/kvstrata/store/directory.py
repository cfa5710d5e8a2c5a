"""Which replica of which segment lies where, and which of them keeps the history from being lost.

One record per chunk. Its segments are in the memory arena, in the file tier, or in both. The file replica is the
authority once it is published; before that the memory replica is, and it cannot be evicted: an exact demotion keeps
the old copy until the new one has been validated.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.states import FILE_REPLICA, FileReplicaState
from kvstrata.errors import Reason, StateError, StoreError
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["ChunkRecord", "Directory", "SegmentKey"]

SegmentKey = tuple[bytes, int]
"""Owner of a slot that holds a sealed segment: (chunk digest, layer)."""


class ChunkRecord:
    """One sealed chunk as this process knows it.

    identity, digest: what it is. grants: its slot in each layer, or `None`. file: its replica in the file tier.
    failure: why the last attempt to write it failed. users: open histories that contain it.
    """

    __slots__ = ("digest", "failure", "file", "grants", "identity", "users")

    def __init__(self, identity: ChunkIdentity, layers: int) -> None:
        self.identity = identity
        self.digest = identity.digest
        self.grants: list[Grant | None] = [None] * layers
        self.file = FileReplicaState.ABSENT
        self.failure: StoreError | None = None
        self.users = 0

    @property
    def resident(self) -> int:
        """Layers whose segment is in the arena."""
        return sum(grant is not None for grant in self.grants)

    @property
    def evictable(self) -> bool:
        """Whether the memory replica may go: only when the file replica would survive it."""
        return self.file is FileReplicaState.PUBLISHED


class Directory:
    """Records of all chunks in use. Thread-safe; no call blocks on I/O.

    arena: the memory tier. layers: segments per chunk.
    """

    def __init__(self, arena: MemoryArena, layers: int) -> None:
        self.arena = arena
        self.layers = layers
        self.generation = 0
        self._records: dict[bytes, ChunkRecord] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ChunkRecord]:
        with self._lock:
            return iter(list(self._records.values()))

    def acquire(self, identity: ChunkIdentity, *, on_file: bool = False) -> ChunkRecord:
        """The chunk's record, made if there is none; counts one more user. on_file: a validated file replica exists.

        Errors: as `record`.
        """
        with self._lock:
            record = self.record(identity)
            if on_file and record.file in (FileReplicaState.ABSENT, FileReplicaState.REVOKED):
                self.mark(record, FileReplicaState.PUBLISHED)
            record.users += 1
            return record

    def record(self, identity: ChunkIdentity) -> ChunkRecord:
        """The chunk's record, made if there is none, without counting a user.

        Errors: `StateError` when the record found under that digest is another chunk's.
        """
        with self._lock:
            record = self._records.get(identity.digest)
            if record is None:
                record = self._records[identity.digest] = ChunkRecord(identity, self.layers)
            if record.identity != identity:
                raise StateError(
                    Reason.TOKENS_DIFFER, f"two chunks have the name {identity.digest.hex()}; their rows are kept apart"
                )
            return record

    def share(self, record: ChunkRecord) -> None:
        """Count one more user of a chunk that is in use."""
        with self._lock:
            record.users += 1

    def drop(self, record: ChunkRecord) -> None:
        """One user less; the last one takes the memory replica and the record along."""
        with self._lock:
            if record.users < 1:
                raise StateError(Reason.NOT_COMMITTED, "a chunk was dropped more often than it was acquired")
            record.users -= 1
            if record.users == 0:
                for layer in range(self.layers):
                    self._release(record, layer)
                self._records.pop(record.digest, None)

    def publish(self, record: ChunkRecord, layer: int, grant: Grant) -> None:
        """Make the filled slot the chunk's memory replica in `layer`.

        Checks owner and allocation generation first. Errors: `StateError` when either is not as reserved, or when the
        layer has a memory replica already.
        """
        with self._lock:
            if record.grants[layer] is not None:
                raise StateError(Reason.NOT_COMMITTED, f"layer {layer} of the chunk has a memory replica already")
            self.arena.publish(grant, (record.digest, layer))
            record.grants[layer] = grant
            self.generation += 1

    def adopt(self, record: ChunkRecord, layer: int, grant: Grant, tail_owner: Hashable) -> None:
        """Turn the open tail's slot into the sealed chunk's memory replica, or free it if there is one already.

        May be repeated after an interruption, whatever was done by then.
        """
        with self._lock:
            if record.grants[layer] is not None:
                if record.grants[layer] != grant and self.arena.belongs(grant, tail_owner):
                    self.arena.release(grant)
                return
            if self.arena.belongs(grant, tail_owner):
                self.arena.rename(grant, tail_owner, (record.digest, layer))
            record.grants[layer] = grant
            self.generation += 1

    def evict(self, record: ChunkRecord, layer: int) -> None:
        """Give up the memory replica of one segment. Errors: `StateError` while it is the only valid replica."""
        with self._lock:
            if record.grants[layer] is None:
                return
            if not record.evictable:
                raise StateError(Reason.NOT_COMMITTED, "the memory replica is the last valid one and cannot be evicted")
            self._release(record, layer)

    def mark(self, record: ChunkRecord, state: FileReplicaState, failure: StoreError | None = None) -> None:
        """Note what became of the file replica. Errors: `StateError` for an illegal transition."""
        with self._lock:
            record.file = FILE_REPLICA.require(record.file, state)
            record.failure = failure
            self.generation += 1

    def hold(self, record: ChunkRecord) -> list[Grant]:
        """Keep the bytes of every resident segment in place until each returned grant has been let go."""
        with self._lock:
            held = []
            for layer, grant in enumerate(record.grants):
                if grant is not None:
                    self.arena.hold(grant, (record.digest, layer))
                    held.append(grant)
            return held

    def _release(self, record: ChunkRecord, layer: int) -> None:
        grant = record.grants[layer]
        if grant is not None:
            record.grants[layer] = None
            self.arena.release(grant)
            self.generation += 1
