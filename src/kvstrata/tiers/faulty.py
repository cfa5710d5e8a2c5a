"""Faults of whole operations: a chunk tier, an arena's memory, and acknowledgements that fail on purpose.

These stand above the checksums. What they change about a read is a refusal or a miss, never other bytes: bytes are
corrupted by `FaultyFiles`, below, or in memory by `FaultyBacking`, where whoever copies verifies what arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstrata.contract.capability import TierCapability
from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.tiers.chunk_file import ReadReceipt
from kvstrata.tiers.fault_plan import Fault, FaultInjector
from kvstrata.tiers.files import WriteReceipt
from kvstrata.tiers.interface import ChunkReader, ChunkTier
from kvstrata.tiers.memory import Backing

__all__ = ["FaultyBacking", "FaultyDelivery", "FaultyReader", "FaultyTier"]

_ANY = frozenset({Fault.DELAY, Fault.HANG, Fault.DIE})
_READ = _ANY | {Fault.SHORTEN, Fault.CORRUPT, Fault.LOSE, Fault.DUPLICATE}
_WRITE = _ANY | {Fault.LOSE, Fault.DUPLICATE, Fault.FILL_UP}

Event = TypeVar("Event")


class FaultyTier:
    """`tier` with faults in `has`, `open`, `read`, `write` and `revoke`.

    LOSE of `open` is CHUNK_MISSING although the chunk is there, so that a hit is not an arrival; of `write`, a receipt
    without a chunk. SHORTEN and CORRUPT of `read` are what verification would say of such bytes. FILL_UP is STORE_FULL.
    """

    def __init__(self, tier: ChunkTier, injector: FaultInjector) -> None:
        self.tier = tier
        self.injector = injector

    @property
    def capability(self) -> TierCapability:
        return self.tier.capability

    @property
    def durable(self) -> bool:
        return self.tier.durable

    @property
    def read_only(self) -> bool:
        return self.tier.read_only

    def has(self, chunk: bytes) -> bool:
        return self.injector.next("has", _ANY | {Fault.LOSE}) is not Fault.LOSE and self.tier.has(chunk)

    def list(self) -> Iterator[bytes]:
        self.injector.next("list", _ANY)
        return self.tier.list()

    def open(self, chunk: bytes) -> FaultyReader:
        if self.injector.next("open_chunk", _ANY | {Fault.LOSE}) is Fault.LOSE:
            raise _damaged(Reason.CHUNK_MISSING, chunk, "is not found")
        return FaultyReader(self.tier.open(chunk), self.injector)

    def write(
        self, identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]
    ) -> WriteReceipt:
        fault = self.injector.next("write", _WRITE)
        if fault is Fault.FILL_UP:
            raise StoreError(Reason.STORE_FULL, "injected: no room for the chunk", "free space")
        receipt = self.tier.write(identity, layout, segments)
        if fault is Fault.DUPLICATE:
            self.tier.write(identity, layout, segments)
        elif fault is Fault.LOSE:
            self.tier.revoke(identity.digest)
        return receipt

    def revoke(self, chunk: bytes) -> bool:
        self.injector.next("revoke", _ANY)
        return self.tier.revoke(chunk)


class FaultyReader:
    """An open chunk with faults in `read`."""

    def __init__(self, reader: ChunkReader, injector: FaultInjector) -> None:
        self._reader = reader
        self._injector = injector
        self.identity = reader.identity
        self.layout = reader.layout
        self.layers = reader.layers
        self.tokens = reader.tokens
        self.segment_bytes = reader.segment_bytes
        self.nbytes = reader.nbytes
        self.stored_bytes = reader.stored_bytes

    def read_into(self, layer: int, buffers: Sequence[memoryview]) -> int:
        self._before()
        return self._reader.read_into(layer, buffers)

    def checksum(self, layer: int) -> bytes:
        return self._reader.checksum(layer)

    def verify_payload(self) -> ReadReceipt:
        self._before()
        return self._reader.verify_payload()

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _before(self) -> None:
        fault = self._injector.next("read", _READ - {Fault.DUPLICATE})
        chunk = self.identity.digest
        if fault is Fault.LOSE:
            raise StoreError(Reason.STORE_IO, f"injected: chunk {chunk.hex()[:16]} cannot be read", "try again")
        if fault is Fault.SHORTEN:
            raise _damaged(Reason.CHUNK_TRUNCATED, chunk, "ends early")
        if fault is Fault.CORRUPT:
            raise _damaged(Reason.CHUNK_DAMAGED, chunk, "does not match its checksum")


class FaultyBacking:
    """An arena's memory with faults in `flush` and `readable`: what is in a slot is not what was written.

    CORRUPT: one bit of the slot is another. LOSE: the slot keeps zeros. In `flush` both come after the copier verified
    what it wrote, as memory that fails; only comparing the slot with the source finds them. In `readable` they come
    before whoever copies out of the slot: memory that failed since it was filled.
    """

    def __init__(self, backing: Backing, injector: FaultInjector) -> None:
        self.backing = backing
        self.injector = injector

    @property
    def slots(self) -> int:
        return self.backing.slots

    def readable(self, slot: int) -> memoryview:
        self._spoil(self.injector.next("readable", _ANY | {Fault.CORRUPT, Fault.LOSE}), slot)
        return self.backing.readable(slot)

    def writable(self, slot: int) -> memoryview:
        return self.backing.writable(slot)

    def flush(self, slot: int) -> None:
        fault = self.injector.next("flush", _ANY | {Fault.CORRUPT, Fault.LOSE})
        self.backing.flush(slot)
        self._spoil(fault, slot)

    def close(self) -> None:
        self.backing.close()

    def _spoil(self, fault: Fault | None, slot: int) -> None:
        if fault is not None:
            view = self.backing.writable(slot)
            if fault is Fault.CORRUPT:
                view[view.nbytes // 2] ^= 1
            else:
                view[:] = bytes(view.nbytes)
            self.backing.flush(slot)

    def __getattr__(self, name: str) -> Any:
        """What a backing has beyond the protocol, such as its slots as tensors."""
        return getattr(self.backing, name)


class FaultyDelivery:
    """Acknowledgements that come twice (DUPLICATE), after the next one (REORDER), or not until `flush` (LOSE, HANG).

    Stands between a copier and whoever takes its events: `FaultyDelivery(injector)(take, event)`.
    """

    def __init__(self, injector: FaultInjector) -> None:
        self.injector = injector
        self._held: list[Callable[[], object]] = []
        self._kept: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def __call__(self, take: Callable[[Event], object], event: Event) -> None:
        fault = self.injector.next(
            "acknowledge", frozenset({Fault.DELAY, Fault.DIE, Fault.DUPLICATE, Fault.REORDER, Fault.LOSE})
        )
        with self._lock:
            if fault in (Fault.REORDER, Fault.LOSE):
                (self._held if fault is Fault.REORDER else self._kept).append(lambda: take(event))
                return
            after, self._held = self._held, []
        take(event)
        if fault is Fault.DUPLICATE:
            take(event)
        for late in after:
            late()

    def flush(self) -> int:
        """Deliver everything that is still kept back; returns how many."""
        with self._lock:
            late, self._held, self._kept = self._held + self._kept, [], []
        for each in late:
            each()
        return len(late)


def _damaged(reason: Reason, chunk: bytes, what: str) -> DamagedError:
    return DamagedError(
        reason, f"injected: chunk {chunk.hex()[:16]} {what}", "its rows are recomputed", chunk=chunk.hex()
    )
