"""What a transfer is asked for, and what is said about it afterwards: immutable records.

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from kvstrata.contract.identity import Namespace
from kvstrata.contract.layout import SegmentLayout
from kvstrata.cost.credits import Credit
from kvstrata.errors import Reason, StoreError

__all__ = [
    "Acknowledgement",
    "CopyEvent",
    "CopyOrder",
    "DirectionTotals",
    "Refusal",
    "SegmentSource",
    "TransferOutcome",
    "TransferReceipt",
    "TransferResult",
    "UnitKey",
]


class SegmentSource(NamedTuple):
    """One segment of the source tier: chunk digest, layer, generation of the replica that is read, and the authority
    epoch under which that replica was found valid."""

    chunk: bytes
    layer: int
    replica_generation: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class UnitKey:
    """What is read, with everything that decides bytes and meaning. Requests share a read only when all of it is equal.

    context: digest of the chunks' context: model and revision, adapters, geometry, positions, lineage, chunk size.
    source: name of the tier. Source: hierarchical K/V memory, section 0x08J.
    """

    namespace: Namespace
    context: bytes
    segments: tuple[SegmentSource, ...]
    layout: SegmentLayout
    source: str
    codec: str = "none"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Taken once: a layer's cold set has many segments, and every look-up would walk them again."""
        return hash((self.namespace, self.context, self.segments, self.layout, self.source, self.codec))


class TransferOutcome(StrEnum):
    """How one request's transfer ended. Only after READY may the rows at its destination be used.

    STALE_CACHE_GENERATION: the cache moved on meanwhile. RECYCLED_DESTINATION: the slot was given to somebody else.
    IDENTITY_MISMATCH: the slot is in its generation, and another owner's. FAILED: the source could not be read; the
    result carries the error.
    """

    READY = "ready"
    STALE_CACHE_GENERATION = "stale_cache_generation"
    RECYCLED_DESTINATION = "recycled_destination"
    IDENTITY_MISMATCH = "identity_mismatch"
    SHORT_COPY = "short_copy"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    LAYOUT_MISMATCH = "layout_mismatch"
    CANCELLED = "cancelled"
    LATE = "late"
    FAILED = "failed"


class Acknowledgement(StrEnum):
    """What was made of a copier's completion.

    ACCEPTED: the copy was verified, whatever came of it. STALE: the transfer was dead, by cancellation or reset; its
    slots and credits are free now. DUPLICATE: it was acknowledged before. UNKNOWN: no such copy is under way.
    """

    ACCEPTED = "accepted"
    STALE = "stale"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """What a copier is to do. generation: of the transfer, never used again. nbytes: payload. into: the destination."""

    generation: int
    unit: UnitKey
    nbytes: int
    into: object


@dataclass(frozen=True, slots=True)
class CopyEvent:
    """A copier's acknowledgement: it will not touch the destination again.

    checksum_ok: whether what arrived was verified against the source's checksum. layout, codec: of the source as it was
    found. error: why it could not be read.
    """

    generation: int
    bytes_completed: int
    layout: SegmentLayout
    codec: str = "none"
    checksum_ok: bool = True
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was not admitted; nothing of it is kept, and its destination is the caller's again.

    reason: CREDIT_PRESSURE, QUEUE_FULL, DEADLINE or CLOSED. credit: the resource that was short. waited_s: how long it
    was waited for. Whoever is refused recomputes, postpones or refuses in turn; exact stays exact.
    """

    reason: Reason
    detail: str
    credit: Credit | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferReceipt:
    """What one request's transfer cost.

    requested_bytes: payload it asked for. moved_bytes: read from the source on its account. coalesced_bytes: taken over
    from a read that another request had started. queue_s: admitted until the copy began. service_s: the copier's time.
    stages: of a transfer over several hops, one receipt for each.
    """

    direction: str
    generation: int
    requested_bytes: int
    moved_bytes: int
    coalesced_bytes: int
    queue_s: float
    service_s: float
    stages: tuple[TransferReceipt, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of one request's interest. error: what the copier met, for FAILED and the mismatches it found."""

    outcome: TransferOutcome
    receipt: TransferReceipt
    error: StoreError | None = None

    @property
    def ready(self) -> bool:
        """Whether the rows are published at the destination."""
        return self.outcome is TransferOutcome.READY


@dataclass(frozen=True, slots=True)
class DirectionTotals:
    """Everything that one direction did so far.

    requested_bytes: by all admitted requests. moved_bytes: by the copier, those that came to nothing included.
    coalesced_bytes: requests served by somebody else's read. requests, transfers: admitted, and backend reads they
    needed. refused: not admitted. waited, waited_s: had to wait for credits, and how long. ready, cancelled, late,
    failed: ends of requests. stale, duplicates: completions that were not applied. queue_s, service_s: summed over
    transfers.
    """

    requests: int = 0
    transfers: int = 0
    refused: int = 0
    ready: int = 0
    cancelled: int = 0
    late: int = 0
    failed: int = 0
    stale: int = 0
    duplicates: int = 0
    requested_bytes: int = 0
    moved_bytes: int = 0
    coalesced_bytes: int = 0
    queue_s: float = 0.0
    service_s: float = 0.0
    waited: int = 0
    waited_s: float = 0.0
