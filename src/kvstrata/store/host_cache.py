"""The host tier between device and files: segments come down before they leave the device, and go up again by a copy.

It keeps a copy while the device has one as well, so that the next eviction moves nothing. Where the durable tier holds
the chunk, a place here only saves time, and the policy and the admission filter decide about it. Where nothing else
would survive, the copy is the authority: it is made whatever has to leave for it, and it stays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from kvstrata.contract.states import FileReplicaState, ResidencyState
from kvstrata.errors import Reason, StateError
from kvstrata.ports import Clock
from kvstrata.store.admission import AdmissionConfig, AdmissionFilter, AdmissionOutcome, Contender
from kvstrata.store.directory import ChunkRecord, Directory, SegmentKey
from kvstrata.store.eviction import EvictionPolicy, PolicyConfig, make_policy
from kvstrata.tiers.memory import Backing, Grant, HostBacking, MemoryArena

__all__ = ["DemoteOutcome", "HostCache", "HostTotals", "host_arena", "open_host_cache"]


# An attribute of an enum's class costs as much as a call, and segments come by the thousand.
_DEVICE_VISIBLE, _DEMOTE_RESERVED = ResidencyState.DEVICE_VISIBLE, ResidencyState.DEMOTE_RESERVED
_COPY_OUT, _LOWER_VALID = ResidencyState.COPY_OUT, ResidencyState.LOWER_VALID
_FILE_PUBLISHED = FileReplicaState.PUBLISHED


class DemoteOutcome(StrEnum):
    """What became of a segment that is to leave the device. Only DECLINED and FAILED leave no copy in the host tier."""

    COPIED = "copied"
    PRESENT = "present"
    DECLINED = "declined"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class HostTotals:
    """Segments and bytes that came down, went up and were displaced, and copies that did not match their checksum."""

    demoted: int = 0
    demoted_bytes: int = 0
    hits: int = 0
    hit_bytes: int = 0
    staged: int = 0
    declined: int = 0
    displaced: int = 0
    damaged: int = 0


class HostCache:
    """Segments in `directory.host`. Thread-safe; copies block.

    policy: which segments leave first. admission: whether a segment whose copy only saves time may displace another;
    without it, it may. renew: makes a policy anew, for an interrupt that left one half changed.
    Errors: `StateError` when the directory has no host tier.
    """

    def __init__(
        self,
        directory: Directory,
        policy: EvictionPolicy[SegmentKey],
        admission: AdmissionFilter | None = None,
        clock: Clock = time.monotonic,
        renew: Callable[[], EvictionPolicy[SegmentKey]] | None = None,
    ) -> None:
        if directory.host is None:
            raise StateError(Reason.NOT_COMMITTED, "the directory has no host tier", "pass it a host arena")
        self.directory = directory
        self.arena: MemoryArena = directory.host
        self._counts = dict.fromkeys(HostTotals.__slots__, 0)
        self._policy = policy
        self._admission = admission
        self._clock = clock
        self._renew = renew
        self._moving: dict[Grant, int] = {}
        self._lock = threading.RLock()

    @property
    def totals(self) -> HostTotals:
        """What was done so far."""
        with self._lock:
            return HostTotals(**self._counts)

    def demote(self, record: ChunkRecord, layer: int, *, required: bool = False) -> DemoteOutcome:
        """Copy one segment down from the device; the device's copy stays, valid, until the caller evicts it.

        required: no other valid copy survives the eviction that follows. Reserve, copy, validate, publish; a failure at
        any point leaves the device's copy as it was.
        """
        directory = self.directory
        if record.valid(record.host, layer):
            self._touch(record, layer)
            return DemoteOutcome.PRESENT
        grant = record.grants[layer]
        if record.residency[layer] is _LOWER_VALID:
            directory.advance(record, layer, _DEVICE_VISIBLE)
        if grant is None or record.residency[layer] is not _DEVICE_VISIBLE:
            return DemoteOutcome.DECLINED
        slot = self._reserve(record, layer, required=required)
        if slot is None:
            return DemoteOutcome.DECLINED
        try:
            directory.advance(record, layer, _DEMOTE_RESERVED)
            directory.advance(record, layer, _COPY_OUT)
            source, target = directory.arena.backing.readable(grant.slot), self.arena.backing.writable(slot.slot)
            checksum = xxh3_128_digest(source)
            _copy([target], source)
            self.arena.backing.flush(slot.slot)
            if not directory.arena.belongs(grant, record.key(layer)):
                # Nothing kept the slot in place: what was read may be its next owner's.
                return DemoteOutcome.FAILED
            if xxh3_128_digest(target) != checksum:
                self._count(damaged=1)
                return DemoteOutcome.FAILED
            self._publish(record, layer, slot, checksum, demoted=1, demoted_bytes=source.nbytes)
            directory.advance(record, layer, _LOWER_VALID)
            return DemoteOutcome.COPIED
        finally:
            self._settle(record, layer, slot)
            if record.residency[layer] in (_DEMOTE_RESERVED, _COPY_OUT):
                directory.advance(record, layer, _DEVICE_VISIBLE)

    def demote_whole(self, record: ChunkRecord) -> bool:
        """Give every segment of a chunk a copy here that may be its last; whether all of them have one now.

        In a tier that is too small for the chunk, one segment's copy makes room for another's.
        """
        done = (DemoteOutcome.COPIED, DemoteOutcome.PRESENT)
        layers = range(self.directory.layers)
        moved = all(self.demote(record, layer, required=True) in done for layer in layers)
        return moved and all(record.valid(record.host, layer) for layer in layers)

    def load(self, record: ChunkRecord, layer: int, buffers: Sequence[memoryview]) -> int | None:
        """Copy a segment into `buffers` and verify it; the bytes, or `None` when there is no sound copy here.

        A copy that does not match its checksum is revoked; what it held comes from the tier below.
        """
        with self._lock:
            if self._admission is not None:
                self._admission.record(_name((record.digest, layer)))
            grant = record.host.grants[layer]
            if grant is None or not record.valid(record.host, layer):
                return None
            checksum = record.host.checksums[layer]
            self.arena.hold(grant, record.key(layer))
            self._touch(record, layer)
        try:
            source = self.arena.backing.readable(grant.slot)
            _copy(buffers, source)
        finally:
            self.arena.let_go(grant)
        hasher = xxh3_128()
        for buffer in buffers:
            hasher.update(buffer)
        if hasher.digest() != checksum:
            self._count(damaged=1)
            self._revoke(record, layer)
            return None
        self._count(hits=1, hit_bytes=source.nbytes)
        return source.nbytes

    def stage(self, record: ChunkRecord, layer: int, buffers: Sequence[memoryview], checksum: bytes) -> bool:
        """Keep a copy of what was just read, verified, into `buffers`, if it may have a place; whether it has one."""
        if record.valid(record.host, layer):
            return True
        slot = self._reserve(record, layer, required=False)
        if slot is None:
            return False
        try:
            target = self.arena.backing.writable(slot.slot)
            start = 0
            for buffer in buffers:
                _copy([target[start : start + buffer.nbytes]], buffer)
                start += buffer.nbytes
            self.arena.backing.flush(slot.slot)
            if xxh3_128_digest(target) != checksum:
                self._count(damaged=1)
                return False
            self._publish(record, layer, slot, checksum, staged=1)
            return True
        finally:
            self._settle(record, layer, slot)

    def reclaim(self) -> int:
        """After an interruption of this thread: free slots that nobody noted; returns how many. Does not block."""
        with self._lock:
            here = threading.get_ident()
            self._moving = {slot: thread for slot, thread in self._moving.items() if thread != here}
            there = {
                (record.digest, layer): grant
                for record in self.directory
                for layer, grant in enumerate(record.host.grants)
                if grant is not None
            }
            if self._renew is not None:
                self._policy = self._renew()
                for key in there:
                    self._policy.admit(key, self.arena.slot_bytes, self._clock())
            return self.arena.reclaim({*there.values(), *self._moving})

    def _settle(self, record: ChunkRecord, layer: int, slot: Grant) -> None:
        if slot not in self._moving:
            return
        with self._lock:
            if self._moving.pop(slot, None) is not None and record.host.grants[layer] != slot:
                self.arena.release(slot)

    def _publish(self, record: ChunkRecord, layer: int, slot: Grant, checksum: bytes, **counts: int) -> None:
        with self._lock:
            key = (record.digest, layer)
            if key in self._policy:
                self._policy.remove(key)
            self.directory.publish_host(record, layer, slot, checksum)
            self._policy.admit(key, self.arena.slot_bytes, self._clock())
            for name, amount in counts.items():
                self._counts[name] += amount
            self._moving.pop(slot, None)

    def _reserve(self, record: ChunkRecord, layer: int, *, required: bool) -> Grant | None:
        with self._lock:
            if record.host.state is _FILE_PUBLISHED and record.host.epoch != record.epoch:
                # Copies of an older epoch are never read; in their place there would be no room for a valid one.
                for each in range(self.directory.layers):
                    self._revoke(record, each)
            slot = self.arena.reserve(record.key(layer))
            while slot is None:
                victims = self._policy.victims(count=1, pinned=self._is_last).keys
                if not victims or not (required or self._admits((record.digest, layer), victims[0])):
                    self._count(declined=1)
                    return None
                self._displace(victims[0])
                slot = self.arena.reserve(record.key(layer))
            self._moving[slot] = threading.get_ident()
            return slot

    def _admits(self, newcomer: SegmentKey, victim: SegmentKey) -> bool:
        if self._admission is None or self.directory.find(victim[0]) is None:
            return True
        decision = self._admission.decide(Contender(_name(newcomer)), [Contender(_name(victim))])
        return decision.outcome is AdmissionOutcome.ADMITTED

    def _displace(self, key: SegmentKey) -> None:
        self._policy.remove(key)
        record = self.directory.find(key[0])
        if record is not None and record.host.grants[key[1]] is not None:
            self.directory.evict_host(record, key[1])
            self._count(displaced=1)

    def _is_last(self, key: SegmentKey) -> bool:
        record = self.directory.find(key[0])
        if record is None:
            return False
        return self.directory.valid_copies(record, key[1], leaving=record.host) < self.directory.survivors

    def _revoke(self, record: ChunkRecord, layer: int) -> None:
        with self._lock:
            key = (record.digest, layer)
            if key in self._policy:
                self._policy.remove(key)
            self.directory.revoke_host(record, layer)

    def _touch(self, record: ChunkRecord, layer: int) -> None:
        with self._lock:
            key = (record.digest, layer)
            if key in self._policy:
                self._policy.touch(key, self._clock())

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount


def host_arena(
    slot_bytes: int, slots: int, *, wipe: bool = False, backing: Callable[[int, int], Backing] = HostBacking
) -> MemoryArena | None:
    """Host memory for `slots` segments, `None` for 0; `wipe` as in `MemoryArena`. backing(slot_bytes, slots): makes the
    memory.
    """
    return MemoryArena(slot_bytes, backing(slot_bytes, slots), wipe=wipe) if slots else None


def open_host_cache(directory: Directory, policy: str | PolicyConfig = "lru") -> HostCache | None:
    """A cache over the directory's host tier, or `None` when it has none.

    The admission filter keeps what is there when every segment is asked for equally often, as decoding does: a recency
    rule alone would displace each one just before it is needed again.
    """
    if directory.host is None:
        return None
    counters = 1 << max(1, (directory.host.slots - 1).bit_length())
    config = AdmissionConfig(counters=counters, sample=10 * counters)
    return HostCache(directory, make_policy(policy), AdmissionFilter(config), renew=lambda: make_policy(policy))


def _name(key: SegmentKey) -> bytes:
    return key[0] + key[1].to_bytes(4, "little")


def _copy(buffers: Sequence[memoryview], source: memoryview) -> None:
    # NumPy lets other threads run while it copies; a slice assignment of the interpreter does not.
    flat, start = np.frombuffer(source, np.uint8), 0
    for buffer in buffers:
        np.copyto(np.frombuffer(buffer, np.uint8), flat[start : start + buffer.nbytes])
        start += buffer.nbytes
