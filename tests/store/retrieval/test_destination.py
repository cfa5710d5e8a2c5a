from __future__ import annotations

import pytest

from kvstrata.errors import BudgetError, StateError
from kvstrata.store.retrieval import GatherDestination
from kvstrata.tiers.memory import HostBacking, MemoryArena


def make_destination(slots: int = 2) -> GatherDestination:
    return GatherDestination(MemoryArena(64, HostBacking(64, slots), generation=84), "device", event=30)


def test_each_publication_is_an_event_of_its_own() -> None:
    destination = make_destination()
    grants = [destination.reserve(name, 64) for name in "ab"]
    assert [grant.generation for grant in grants] == [85, 85]
    assert [destination.publish(grant, name) for grant, name in zip(grants, "ab", strict=True)] == [31, 32]
    assert [destination.event(grant.slot) for grant in grants] == [31, 32]
    assert (destination.allocation(9), destination.event(-1)) == (-1, -1)


def test_a_slot_of_another_is_not_published() -> None:
    destination = make_destination()
    grant = destination.reserve("a", 1)
    with pytest.raises(StateError):
        destination.publish(grant, "b")
    destination.arena.release(grant)
    with pytest.raises(StateError):
        destination.publish(grant, "a")
    assert destination.event(grant.slot) == 30


def test_no_room_is_a_refusal_with_a_budget_that_would_do() -> None:
    destination = make_destination(1)
    with pytest.raises(BudgetError, match="65 bytes of gathered rows find no room: 1 of 1 slots of 64 bytes are free"):
        destination.reserve("a", 65)
    destination.reserve("a", 64)
    with pytest.raises(BudgetError) as refusal:
        destination.reserve("b", 64)
    assert refusal.value.required_bytes == 128
