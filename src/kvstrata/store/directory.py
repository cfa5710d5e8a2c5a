"""Which replica of which segment lies where, and which of them keeps the history from being lost.

One record per chunk in use. Its segments are in the device arena, in the host arena, in the durable tier, or in several
of them. The authority is the copy whose survival prevents loss. Every change of authority starts a new epoch under
which the copies that are still valid are counted again; a copy of an older epoch is never read. No segment's last valid
copy is given up: an exact demotion keeps the old one until the new one has been validated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

from kvstrata.contract.capability import DEVICE, FILES, HOST
from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.states import FILE_REPLICA, RESIDENCY, FileReplicaState, ResidencyState, SlotState
from kvstrata.errors import ConfigurationError, Reason, StateError, StoreError
from kvstrata.store.replicas import ChunkRecord, Replica, SegmentKey
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["ChunkRecord", "Directory", "Replica", "SegmentKey"]

# An attribute of an enum's class costs as much as a call, and segments come by the thousand.
_FILE_PUBLISHED = FileReplicaState.PUBLISHED


class Directory:
    """Records of all chunks in use. Thread-safe; no call blocks on I/O.

    arena: the device's memory. layers: segments per chunk. host: a second memory tier below it, or `None`.
    generation: of the directory; every replica that comes to life takes the next one. survivors: valid copies of each
    segment that must be left when one is given up. dropped: called with the name of a leased chunk that is used no
    more.
    """

    def __init__(
        self,
        arena: MemoryArena,
        layers: int,
        host: MemoryArena | None = None,
        *,
        generation: int = 0,
        survivors: int = 1,
        dropped: Callable[[bytes], None] = lambda chunk: None,
    ) -> None:
        if survivors < 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"survivors={survivors} must be at least 1")
        self.arena = arena
        self.host = host
        self.layers = layers
        self.generation = generation
        self.survivors = survivors
        self._dropped = dropped
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
            record = self.record(identity, on_file=on_file)
            record.users += 1
            return record

    def record(self, identity: ChunkIdentity, *, on_file: bool = False) -> ChunkRecord:
        """As `acquire`, without counting a user: until the caller has counted one, `reclaim` forgets a new record.

        Errors: `StateError` when the record found under that digest is another chunk's.
        """
        with self._lock:
            record = self._records.get(identity.digest)
            if record is None:
                self.generation += 1
                record = self._records[identity.digest] = ChunkRecord(identity, self.layers, self.generation)
            if record.identity != identity:
                raise StateError(
                    Reason.TOKENS_DIFFER, f"two chunks have the name {identity.digest.hex()}; their rows are kept apart"
                )
            if on_file and record.file in (FileReplicaState.ABSENT, FileReplicaState.REVOKED):
                self.mark(record, FileReplicaState.PUBLISHED)
            return record

    def find(self, digest: bytes) -> ChunkRecord | None:
        """The record under that name, if the chunk is in use."""
        return self._records.get(digest)

    def share(self, record: ChunkRecord) -> None:
        """Count one more user of a chunk that is in use."""
        with self._lock:
            record.users += 1

    def drop(self, record: ChunkRecord) -> None:
        """One user less; the last one takes the memory replicas and the record along."""
        self.drop_last([record])

    def drop_last(self, held: list[Any]) -> None:
        """As `drop` for the last record of `held`, which leaves the list in the same moment: an interrupt finds both
        done or neither."""
        with self._lock:
            record = held[-1]
            if record.users < 1:
                raise StateError(Reason.NOT_COMMITTED, "a chunk was dropped more often than it was acquired")
            # Signals are not served between these stores.
            record.users, held[-1:] = record.users - 1, ()
            if record.users == 0:
                self._forget(record)

    def end_lease(self, record: ChunkRecord) -> None:
        """Let go of the durable replica, which may be evicted from now on."""
        if record.leased:
            record.leased = False
            self._dropped(record.digest)

    def reserve(self, record: ChunkRecord, layer: int) -> Grant | None:
        """A device slot for a segment that is to be promoted, or `None` when every slot is taken.

        Errors: `StateError` while the segment is there already or on its way.
        """
        with self._lock:
            RESIDENCY.require(record.residency[layer], ResidencyState.PROMOTE_RESERVED)
            grant = self.arena.reserve((record.digest, layer))
            if grant is not None:
                record.residency[layer] = ResidencyState.PROMOTE_RESERVED
                record.moving[layer] = grant
            return grant

    def advance(self, record: ChunkRecord, layer: int, state: ResidencyState) -> None:
        """Note how far a segment has come on its way. Errors: `StateError` for an illegal transition."""
        record.residency[layer] = RESIDENCY.require(record.residency[layer], state)

    def abandon(self, record: ChunkRecord, layer: int, grant: Grant) -> None:
        """End a promotion that came to nothing: its slot is free again. The caller vouches that nobody writes to it."""
        with self._lock:
            if record.grants[layer] == grant:
                return
            self.disown(record, layer, grant)
            self.arena.release(grant)

    def disown(self, record: ChunkRecord, layer: int, grant: Grant) -> None:
        """Nobody waits for a promotion any more, and its reader is late: the segment may be promoted anew, into another
        slot. This one stays taken until `abandon`, after the reader has acknowledged."""
        with self._lock:
            if record.moving[layer] == grant:
                record.moving[layer] = None
                if record.grants[layer] is None:
                    record.residency[layer] = ResidencyState.DEVICE_RELEASED

    def publish(self, record: ChunkRecord, layer: int, grant: Grant) -> None:
        """Make the filled slot the chunk's device replica in `layer`.

        Checks record, owner and allocation generation first. Errors: `StateError` when any is not as reserved, or when
        the layer has a device replica already.
        """
        with self._lock:
            if record.grants[layer] is not None:
                raise StateError(Reason.NOT_COMMITTED, f"layer {layer} of the chunk has a memory replica already")
            if self._records.get(record.digest) is not record:
                raise StateError(
                    Reason.NOT_COMMITTED, "the chunk's record was dropped while its rows were on their way"
                )
            if record.residency[layer] is ResidencyState.PROMOTE_RESERVED:
                self.advance(record, layer, ResidencyState.COPY_IN)
            if record.residency[layer] is ResidencyState.COPY_IN:
                self.advance(record, layer, ResidencyState.DEVICE_STAGED)
            following = RESIDENCY.require(record.residency[layer], ResidencyState.DEVICE_VISIBLE)
            if not self._published(grant, (record.digest, layer)):
                self.arena.publish(grant, (record.digest, layer))
            self._revive(record, record.device)
            # Signals are not served between these stores.
            record.grants[layer], record.residency[layer], record.moving[layer] = grant, following, None

    def adopt(self, record: ChunkRecord, layer: int, grant: Grant, tail_owner: Hashable) -> None:
        """Turn the open tail's slot into the sealed chunk's device replica, or free it if there is one already.

        May be repeated after an interruption, whatever was done by then.
        """
        with self._lock:
            if record.grants[layer] is not None:
                if record.grants[layer] != grant and self.arena.belongs(grant, tail_owner):
                    self.arena.release(grant)
                return
            if self.arena.belongs(grant, tail_owner):
                self.arena.rename(grant, tail_owner, (record.digest, layer))
            self._revive(record, record.device)
            record.residency[layer] = ResidencyState.DEVICE_VISIBLE
            record.grants[layer] = grant
            if not record.authority and None not in record.grants:
                self._appoint(record)

    def evict(self, record: ChunkRecord, layer: int) -> None:
        """Give up the device replica of one segment. Errors: `StateError` while no valid replica would survive it."""
        with self._lock:
            if record.grants[layer] is None:
                return
            if self.valid_copies(record, layer, leaving=record.device) < self.survivors:
                raise StateError(Reason.NOT_COMMITTED, "the memory replica is the last valid one and cannot be evicted")
            if record.residency[layer] is not ResidencyState.LOWER_VALID:
                self.advance(record, layer, ResidencyState.LOWER_VALID)
            self._release(record, layer)

    def publish_host(self, record: ChunkRecord, layer: int, grant: Grant, checksum: bytes) -> None:
        """Make a filled slot of the host arena the chunk's host replica in `layer`. Errors: as `publish`."""
        with self._lock:
            if self.host is None:
                raise StateError(Reason.NOT_COMMITTED, "there is no host tier")
            if self._records.get(record.digest) is not record:
                raise StateError(
                    Reason.NOT_COMMITTED, "the chunk's record was dropped while its rows were on their way"
                )
            if record.host.grants[layer] is not None:
                raise StateError(Reason.NOT_COMMITTED, f"layer {layer} of the chunk has a host replica already")
            self.host.publish(grant, (record.digest, layer))
            self._revive(record, record.host)
            # Signals are not served between these stores: without its checksum a sound copy would count as damaged.
            record.host.checksums[layer], record.host.grants[layer] = checksum, grant
            if not record.authority:
                self._appoint(record)

    def evict_host(self, record: ChunkRecord, layer: int) -> None:
        """Give up the host replica of one segment. Errors: `StateError` while no valid replica would survive it."""
        with self._lock:
            if record.host.grants[layer] is None:
                return
            if self.valid_copies(record, layer, leaving=record.host) < self.survivors:
                raise StateError(Reason.NOT_COMMITTED, "the host replica is the last valid one and cannot be evicted")
            self._release_host(record, layer)

    def revoke_host(self, record: ChunkRecord, layer: int) -> None:
        """Take a damaged host replica of one segment out of use, whatever else there is."""
        with self._lock:
            self._release_host(record, layer)

    def valid_copies(self, record: ChunkRecord, layer: int, leaving: Replica | None = None) -> int:
        """Copies of one segment that are valid under the current epoch, `leaving` not counted."""
        return sum(replica is not leaving and record.valid(replica, layer) for replica in record.replicas)

    def choose(self, record: ChunkRecord, layer: int, order: Sequence[str] = (DEVICE, HOST, FILES)) -> Replica | None:
        """The first valid copy of one segment among the tiers of `order`."""
        by_tier = {replica.tier: replica for replica in record.replicas}
        return next((by_tier[tier] for tier in order if record.valid(by_tier[tier], layer)), None)

    def mark(self, record: ChunkRecord, state: FileReplicaState, failure: StoreError | None = None) -> None:
        """Note what became of the durable replica. Errors: `StateError` for an illegal transition."""
        with self._lock:
            record.durable.state = FILE_REPLICA.require(record.durable.state, state)
            record.failure = failure
            if state is FileReplicaState.PUBLISHED:
                self.generation += 1
                record.durable.generation = self.generation
                record.durable.layout = record.durable.payload = None
                self._appoint(record, fresh=record.durable)
            elif state is FileReplicaState.REVOKED:
                self._appoint(record)

    def hold(self, record: ChunkRecord) -> list[Grant]:
        """Keep the bytes of every resident segment in place until each returned grant has been let go."""
        with self._lock:
            held = []
            for layer, grant in enumerate(record.grants):
                if grant is not None:
                    self.arena.hold(grant, (record.digest, layer))
                    held.append(grant)
            return held

    def reclaim(self, known: Collection[Grant]) -> None:
        """After an interruption: free device slots that nobody noted, and forget promotions that nobody finishes and
        records that nobody uses.

        known: every grant that anybody else than a record uses, reads under way included.
        """
        with self._lock:
            for record in self:
                if not record.users:
                    self._forget(record)
            held = {grant for record in self for grant in record.grants if grant is not None}
            self.arena.reclaim(held | set(known))
            for record in self:
                for layer, grant in enumerate(record.grants):
                    if record.moving[layer] not in known:
                        record.moving[layer] = None
                    if grant is not None:
                        record.residency[layer] = ResidencyState.DEVICE_VISIBLE
                    elif record.moving[layer] is None:
                        record.residency[layer] = ResidencyState.DEVICE_RELEASED
                self._repair(record)

    def _repair(self, record: ChunkRecord) -> None:
        for replica in (record.device, record.host):
            if replica.state is FileReplicaState.PUBLISHED and not any(replica.grants):
                replica.state = FileReplicaState.ABSENT
        if record.authority in (DEVICE, HOST):
            self._appoint(record)

    def _published(self, grant: Grant, owner: Hashable) -> bool:
        """Whether an interrupt came after the slot was published, and before that was noted."""
        return self.arena.belongs(grant, owner) and self.arena.state(grant.slot) is SlotState.PUBLISHED

    def _forget(self, record: ChunkRecord) -> None:
        for layer in range(self.layers):
            self._release(record, layer)
            self._release_host(record, layer)
        if self._records.get(record.digest) is record:
            del self._records[record.digest]
        self.end_lease(record)

    def _require_current(self, record: ChunkRecord) -> None:
        if self._records.get(record.digest) is not record:
            raise StateError(Reason.NOT_COMMITTED, "the chunk's record was dropped while its rows were on their way")

    def _revive(self, record: ChunkRecord, replica: Replica) -> None:
        if replica.state is not _FILE_PUBLISHED:
            self.generation += 1
            replica.generation = self.generation
            replica.layout = replica.payload = None
            # The state last: a copy that is published under an older epoch never counts again.
            replica.epoch = record.epoch
            replica.state = FileReplicaState.PUBLISHED

    def _appoint(self, record: ChunkRecord, fresh: Replica | None = None) -> None:
        """Choose the authority anew, and count under a new epoch the copies that are valid now."""
        valid = [replica for replica in record.replicas if record.valid(replica)]
        if fresh is not None and fresh not in valid:
            valid.append(fresh)
        whole = [each for each in valid if each is record.durable or None not in each.grants]
        record.authority = whole[-1].tier if whole else ""
        epoch, (device, host, durable) = record.epoch + 1, record.replicas
        epochs = epoch, *[epoch if each in valid else each.epoch for each in record.replicas]
        # Signals are not served between these stores: a copy that is left behind never counts again.
        record.epoch, device.epoch, host.epoch, durable.epoch = epochs

    def _release(self, record: ChunkRecord, layer: int) -> None:
        grant = record.grants[layer]
        if grant is None:
            return
        record.grants[layer] = None
        # The same segment may have come another way since its promotion began, which goes on.
        record.residency[layer] = (
            ResidencyState.DEVICE_RELEASED if record.moving[layer] is None else ResidencyState.PROMOTE_RESERVED
        )
        self.arena.release(grant)
        if not any(record.grants):
            record.device.state = FileReplicaState.ABSENT
        if record.authority == DEVICE:
            self._appoint(record)

    def _release_host(self, record: ChunkRecord, layer: int) -> None:
        grant = record.host.grants[layer]
        if grant is None or self.host is None:
            return
        record.host.grants[layer] = record.host.checksums[layer] = None
        self.host.release(grant)
        if not any(record.host.grants):
            record.host.state = FileReplicaState.ABSENT
        if record.authority == HOST:
            self._appoint(record)
