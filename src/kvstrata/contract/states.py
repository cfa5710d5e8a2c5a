"""State machines as tables: a transition that is not listed is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvstrata.errors import Reason, StateError

__all__ = [
    "DURABLE_CHUNK",
    "FILE_REPLICA",
    "LEASE",
    "RESIDENCY",
    "SLOT",
    "SNAPSHOT",
    "TRANSFER",
    "WAITER",
    "DurableChunkState",
    "FileReplicaState",
    "LeaseState",
    "ResidencyState",
    "SlotState",
    "SnapshotState",
    "TransferState",
    "TransitionTable",
    "WaiterState",
]


State = TypeVar("State", bound=StrEnum)


class SlotState(StrEnum):
    """Life of one slot of an arena."""

    # The enum's own hash is a Python call, and a slot changes state thousands of times a second.
    __hash__ = str.__hash__

    FREE = "free"
    RESERVED = "reserved"
    PUBLISHED = "published"
    RETIRED = "retired"


class FileReplicaState(StrEnum):
    """Life of a chunk's replica in the file tier, as one process knows it."""

    ABSENT = "absent"
    WRITING = "writing"
    PUBLISHED = "published"
    FAILED = "failed"
    REVOKED = "revoked"


class ResidencyState(StrEnum):
    """Where one segment is between fast memory and the tier below, and which transaction moves it."""

    __hash__ = str.__hash__

    DEVICE_VISIBLE = "device_visible"
    DEMOTE_RESERVED = "demote_reserved"
    COPY_OUT = "copy_out"
    LOWER_VALID = "lower_valid"
    DEVICE_RELEASED = "device_released"
    PROMOTE_RESERVED = "promote_reserved"
    COPY_IN = "copy_in"
    DEVICE_STAGED = "device_staged"


class TransferState(StrEnum):
    """Life of one transfer: reserve, copy, validate, publish, release."""

    __hash__ = str.__hash__

    QUEUED = "queued"
    RESERVED = "reserved"
    COPYING = "copying"
    COPIED = "copied"
    VALIDATED = "validated"
    PUBLISHED = "published"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RELEASED = "released"


class WaiterState(StrEnum):
    """What became of one request's interest in a transfer that others may share."""

    WAITING = "waiting"
    READY = "ready"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LATE = "late"


class LeaseState(StrEnum):
    """Life of a bounded right to read."""

    GRANTED = "granted"
    REVOKED = "revoked"
    ACKNOWLEDGED = "acknowledged"


class SnapshotState(StrEnum):
    """Life of one generation of a proxy or an index."""

    RESERVED = "reserved"
    WRITTEN = "written"
    VALIDATED = "validated"
    PUBLISHED = "published"
    RETIRED = "retired"
    RECLAIMED = "reclaimed"


class DurableChunkState(StrEnum):
    """Life of a chunk's row in the directory of a durable tier."""

    RESERVED = "reserved"
    PUBLISHED = "published"
    DELETING = "deleting"
    GONE = "gone"


@dataclass(frozen=True)
class TransitionTable(Generic[State]):
    """Which state may follow which."""

    name: str
    allowed: Mapping[State, frozenset[State]]

    def require(self, current: State, following: State) -> State:
        """Return `following`. Errors: `StateError` when the table does not list the transition."""
        if following not in self.allowed[current]:
            raise StateError(Reason.NOT_COMMITTED, f"{self.name}: {current} -> {following} is not a legal transition")
        return following


SLOT = TransitionTable[SlotState](
    "slot",
    {
        SlotState.FREE: frozenset({SlotState.RESERVED}),
        SlotState.RESERVED: frozenset({SlotState.PUBLISHED, SlotState.FREE, SlotState.RETIRED}),
        SlotState.PUBLISHED: frozenset({SlotState.FREE, SlotState.RETIRED}),
        SlotState.RETIRED: frozenset({SlotState.FREE}),
    },
)
"""RETIRED: given up by its owner while a reader or transfer still holds it; free after the last acknowledgement."""

FILE_REPLICA = TransitionTable[FileReplicaState](
    "file replica",
    {
        FileReplicaState.ABSENT: frozenset({FileReplicaState.WRITING, FileReplicaState.PUBLISHED}),
        FileReplicaState.WRITING: frozenset({FileReplicaState.PUBLISHED, FileReplicaState.FAILED}),
        FileReplicaState.PUBLISHED: frozenset({FileReplicaState.REVOKED}),
        FileReplicaState.FAILED: frozenset({FileReplicaState.WRITING}),
        FileReplicaState.REVOKED: frozenset({FileReplicaState.WRITING, FileReplicaState.PUBLISHED}),
    },
)

RESIDENCY = TransitionTable[ResidencyState](
    "residency",
    {
        ResidencyState.DEVICE_VISIBLE: frozenset({ResidencyState.DEMOTE_RESERVED, ResidencyState.LOWER_VALID}),
        ResidencyState.DEMOTE_RESERVED: frozenset({ResidencyState.COPY_OUT, ResidencyState.DEVICE_VISIBLE}),
        ResidencyState.COPY_OUT: frozenset({ResidencyState.LOWER_VALID, ResidencyState.DEVICE_VISIBLE}),
        ResidencyState.LOWER_VALID: frozenset({ResidencyState.DEVICE_RELEASED, ResidencyState.DEVICE_VISIBLE}),
        ResidencyState.DEVICE_RELEASED: frozenset({ResidencyState.PROMOTE_RESERVED}),
        ResidencyState.PROMOTE_RESERVED: frozenset({ResidencyState.COPY_IN, ResidencyState.DEVICE_RELEASED}),
        ResidencyState.COPY_IN: frozenset({ResidencyState.DEVICE_STAGED, ResidencyState.DEVICE_RELEASED}),
        ResidencyState.DEVICE_STAGED: frozenset({ResidencyState.DEVICE_VISIBLE, ResidencyState.DEVICE_RELEASED}),
    },
)
"""LOWER_VALID: both copies are valid, because a demotion ended or because the lower one was there before, published in
the background. The device's may go once its readers have acknowledged, or stay in use. A failed demotion leads back to
DEVICE_VISIBLE and a failed promotion to DEVICE_RELEASED: neither loses the copy that was valid.
"""

TRANSFER = TransitionTable[TransferState](
    "transfer",
    {
        TransferState.QUEUED: frozenset({TransferState.RESERVED, TransferState.CANCELLED, TransferState.FAILED}),
        TransferState.RESERVED: frozenset({TransferState.COPYING, TransferState.CANCELLED, TransferState.FAILED}),
        TransferState.COPYING: frozenset({TransferState.COPIED, TransferState.CANCELLED, TransferState.FAILED}),
        TransferState.COPIED: frozenset({TransferState.VALIDATED, TransferState.CANCELLED, TransferState.FAILED}),
        TransferState.VALIDATED: frozenset({TransferState.PUBLISHED, TransferState.CANCELLED, TransferState.FAILED}),
        TransferState.PUBLISHED: frozenset({TransferState.RELEASED}),
        TransferState.CANCELLED: frozenset({TransferState.RELEASED}),
        TransferState.FAILED: frozenset({TransferState.RELEASED}),
        TransferState.RELEASED: frozenset(),
    },
)
"""CANCELLED and FAILED: dead, but whoever copies may still write to the destination; RELEASED comes with the copier's
acknowledgement, and gives credits and destination back exactly once."""

WAITER = TransitionTable[WaiterState](
    "waiter",
    {
        WaiterState.WAITING: frozenset(
            {WaiterState.READY, WaiterState.CANCELLED, WaiterState.FAILED, WaiterState.LATE}
        ),
        WaiterState.READY: frozenset(),
        WaiterState.CANCELLED: frozenset(),
        WaiterState.FAILED: frozenset(),
        WaiterState.LATE: frozenset(),
    },
)

LEASE = TransitionTable[LeaseState](
    "lease",
    {
        LeaseState.GRANTED: frozenset({LeaseState.ACKNOWLEDGED, LeaseState.REVOKED}),
        LeaseState.REVOKED: frozenset({LeaseState.ACKNOWLEDGED}),
        LeaseState.ACKNOWLEDGED: frozenset(),
    },
)
"""REVOKED: expired or taken back; its holder must not use what it reads, and what it reads stays in place until the
holder has acknowledged."""

SNAPSHOT = TransitionTable[SnapshotState](
    "snapshot",
    {
        SnapshotState.RESERVED: frozenset({SnapshotState.WRITTEN, SnapshotState.RECLAIMED}),
        SnapshotState.WRITTEN: frozenset({SnapshotState.VALIDATED, SnapshotState.RECLAIMED}),
        SnapshotState.VALIDATED: frozenset({SnapshotState.PUBLISHED, SnapshotState.RECLAIMED}),
        SnapshotState.PUBLISHED: frozenset({SnapshotState.RETIRED}),
        SnapshotState.RETIRED: frozenset({SnapshotState.RECLAIMED}),
        SnapshotState.RECLAIMED: frozenset(),
    },
)
"""RETIRED: no new reader; RECLAIMED once the last one has left and a newer generation or a tombstone is visible."""

DURABLE_CHUNK = TransitionTable[DurableChunkState](
    "durable chunk",
    {
        DurableChunkState.RESERVED: frozenset({DurableChunkState.PUBLISHED, DurableChunkState.GONE}),
        DurableChunkState.PUBLISHED: frozenset({DurableChunkState.DELETING}),
        DurableChunkState.DELETING: frozenset({DurableChunkState.GONE}),
        DurableChunkState.GONE: frozenset({DurableChunkState.RESERVED}),
    },
)
"""DELETING is durable before the file goes, so that a kill in between never brings the chunk back."""
