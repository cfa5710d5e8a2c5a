"""Slots are published once each, and what was not published is given back once."""

from __future__ import annotations

import pytest
from transfer_parts import Bench

from kvstrata.contract.states import SlotState
from kvstrata.errors import StateError


def states(place: object, bench: Bench) -> list[SlotState]:
    return [bench.arena.state(grant.slot) for grant in place.grants]  # type: ignore[attr-defined]


def test_an_interrupted_publication_is_continued() -> None:
    bench, seen = Bench(), []

    def publish(index: int) -> None:
        seen.append(index)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        bench.arena.publish(place.grants[index], place.owners[index])

    place = bench.place(["a", "b", "c"], publish_slot=publish)
    with pytest.raises(KeyboardInterrupt):
        place.publish()
    place.publish()
    assert seen == [0, 1, 1, 2]
    assert states(place, bench) == [SlotState.PUBLISHED] * 3


def test_what_was_not_published_is_given_back() -> None:
    bench = Bench()
    place = bench.place(["a", "b"])
    bench.arena.publish(place.grants[0], "a")
    with pytest.raises(StateError):
        place.publish()
    place.release()
    place.release()
    assert states(place, bench) == [SlotState.PUBLISHED, SlotState.FREE]


def test_the_next_owners_slot_is_left_alone() -> None:
    bench = Bench()
    place = bench.place(["a"])
    place.release()
    again = bench.place(["a"])
    assert again.grants[0].slot == place.grants[0].slot
    place.release()
    assert states(again, bench) == [SlotState.RESERVED]
