"""Least recently used: the order is that of the latest uses, and nothing else."""

from __future__ import annotations

from eviction_references import CALLS, Reference, agree
from hypothesis import given

from kvstrata.store.eviction import Lru, Usage


@given(CALLS)
def test_it_agrees_with_the_reference(calls: list[tuple[str, int, int, int, float]]) -> None:
    agree(Lru(), Reference(lambda entry, now: entry.calls[-1]), calls)


def test_a_use_saves_a_key() -> None:
    policy: Lru[str] = Lru()
    for key in "abc":
        policy.admit(key, 10, now=0.0)
    policy.touch("a", now=1.0)
    assert policy.victims(count=3).keys == ("b", "c", "a")


def test_a_past_is_ordered_by_the_latest_use() -> None:
    policy: Lru[str] = Lru()
    policy.restore(Usage(key, 10, created=0.0, last_used=last, uses=uses) for key, last, uses in PAST)
    assert policy.victims(count=3).keys == ("old", "middle", "new")


PAST = [("new", 9.0, 1), ("old", 2.0, 7), ("middle", 5.0, 3)]
