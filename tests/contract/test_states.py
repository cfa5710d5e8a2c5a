"""Transitions that a table does not list are refused, and the tables have no dead ends."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from kvstrata.contract.states import (
    DURABLE_CHUNK,
    FILE_REPLICA,
    LEASE,
    RESIDENCY,
    SLOT,
    SNAPSHOT,
    TRANSFER,
    WAITER,
    DurableChunkState,
    FileReplicaState,
    LeaseState,
    ResidencyState,
    SlotState,
    SnapshotState,
    TransferState,
    TransitionTable,
    WaiterState,
)
from kvstrata.errors import Reason, StateError

LEGAL_SLOT = {
    ("free", "reserved"),
    ("reserved", "published"),
    ("reserved", "free"),
    ("reserved", "retired"),
    ("published", "free"),
    ("published", "retired"),
    ("retired", "free"),
}
LEGAL_FILE = {
    ("absent", "writing"),
    ("absent", "published"),
    ("writing", "published"),
    ("writing", "failed"),
    ("published", "revoked"),
    ("failed", "writing"),
    ("revoked", "writing"),
    ("revoked", "published"),
}
LEGAL_RESIDENCY = {
    ("device_visible", "demote_reserved"),
    ("device_visible", "lower_valid"),
    ("demote_reserved", "copy_out"),
    ("demote_reserved", "device_visible"),
    ("copy_out", "lower_valid"),
    ("copy_out", "device_visible"),
    ("lower_valid", "device_released"),
    ("lower_valid", "device_visible"),
    ("device_released", "promote_reserved"),
    ("promote_reserved", "copy_in"),
    ("promote_reserved", "device_released"),
    ("copy_in", "device_staged"),
    ("copy_in", "device_released"),
    ("device_staged", "device_visible"),
    ("device_staged", "device_released"),
}
_TRANSFER_ORDER = ["queued", "reserved", "copying", "copied", "validated", "published", "released"]
LEGAL_TRANSFER = {
    *pairwise(_TRANSFER_ORDER),
    *((state, dead) for state in _TRANSFER_ORDER[:5] for dead in ("cancelled", "failed")),
    ("cancelled", "released"),
    ("failed", "released"),
}
LEGAL_WAITER = {("waiting", end) for end in ("ready", "cancelled", "failed", "late")}
LEGAL_LEASE = {("granted", "acknowledged"), ("granted", "revoked"), ("revoked", "acknowledged")}
LEGAL_SNAPSHOT = {
    ("reserved", "written"),
    ("written", "validated"),
    ("validated", "published"),
    ("published", "retired"),
    ("retired", "reclaimed"),
    ("reserved", "reclaimed"),
    ("written", "reclaimed"),
    ("validated", "reclaimed"),
}
LEGAL_DURABLE = {
    ("reserved", "published"),
    ("reserved", "gone"),
    ("published", "deleting"),
    ("deleting", "gone"),
    ("gone", "reserved"),
}
MACHINES = [
    (SLOT, SlotState, LEGAL_SLOT),
    (FILE_REPLICA, FileReplicaState, LEGAL_FILE),
    (RESIDENCY, ResidencyState, LEGAL_RESIDENCY),
    (TRANSFER, TransferState, LEGAL_TRANSFER),
    (WAITER, WaiterState, LEGAL_WAITER),
    (LEASE, LeaseState, LEGAL_LEASE),
    (SNAPSHOT, SnapshotState, LEGAL_SNAPSHOT),
    (DURABLE_CHUNK, DurableChunkState, LEGAL_DURABLE),
]


@pytest.mark.parametrize(("table", "states", "legal"), MACHINES, ids=lambda item: getattr(item, "name", None))
def test_exactly_these_transitions(table: TransitionTable, states: type, legal: set[tuple[str, str]]) -> None:
    for current, following in product(states, states):
        if (current.value, following.value) in legal:
            assert table.require(current, following) is following
        else:
            with pytest.raises(StateError, match=f"{table.name}: {current} -> {following}") as refusal:
                table.require(current, following)
            assert refusal.value.reason is Reason.NOT_COMMITTED


def test_nothing_is_published_twice_or_reused_without_being_freed() -> None:
    assert SlotState.PUBLISHED not in SLOT.allowed[SlotState.PUBLISHED]
    assert SLOT.allowed[SlotState.RETIRED] == {SlotState.FREE}
    assert FileReplicaState.PUBLISHED not in FILE_REPLICA.allowed[FileReplicaState.FAILED]
