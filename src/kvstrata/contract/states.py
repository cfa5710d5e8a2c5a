"""State machines as tables: a transition that is not listed is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvstrata.errors import Reason, StateError

__all__ = ["FILE_REPLICA", "SLOT", "FileReplicaState", "SlotState", "TransitionTable"]


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
