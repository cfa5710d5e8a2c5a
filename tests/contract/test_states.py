"""Transitions that a table does not list are refused, and the tables have no dead ends."""

from __future__ import annotations

from itertools import product

import pytest

from kvstrata.contract.states import FILE_REPLICA, SLOT, FileReplicaState, SlotState, TransitionTable
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


@pytest.mark.parametrize(
    ("table", "states", "legal"), [(SLOT, SlotState, LEGAL_SLOT), (FILE_REPLICA, FileReplicaState, LEGAL_FILE)]
)
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
