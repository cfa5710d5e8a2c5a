"""First in, first out: the order is that of the admissions, and uses do not change it."""

from __future__ import annotations

from eviction_references import CALLS, Reference, agree
from hypothesis import given

from kvstrata.store.eviction import Fifo, Usage


@given(CALLS)
def test_it_agrees_with_the_reference(calls: list[tuple[str, int, int, int, float]]) -> None:
    agree(Fifo(), Reference(lambda entry, now: entry.calls[0]), calls)


def test_a_use_saves_nothing() -> None:
    policy: Fifo[str] = Fifo()
    for key in "abc":
        policy.admit(key, 10, now=0.0)
    policy.touch("a", now=1.0)
    assert policy.victims(count=3).keys == ("a", "b", "c")


def test_a_past_is_ordered_by_creation() -> None:
    policy: Fifo[str] = Fifo()
    policy.restore([Usage("second", 1, 2.0, 3.0), Usage("first", 1, 1.0, 9.0), Usage("third", 1, 4.0, 4.0)])
    assert policy.victims(count=3).keys == ("first", "second", "third")
