"""Least frequently used: counters decide, recency among equals, and an old fame fades."""

from __future__ import annotations

import pytest
from eviction_references import CALLS, Reference, agree
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigurationError
from kvstrata.store.eviction import Lfu, LfuConfig, Usage


@given(CALLS, st.integers(1, 30))
def test_it_agrees_with_the_reference(calls: list[tuple[str, int, int, int, float]], halve_every: int) -> None:
    reference = Reference(lambda entry, now: (entry.counter, entry.calls[-1]), halve_every)
    agree(Lfu(LfuConfig(halve_every)), reference, calls)


def test_what_was_popular_once_makes_room_after_ageing() -> None:
    def leaves_first(halve_every: int) -> str:
        policy: Lfu[str] = Lfu(LfuConfig(halve_every))
        policy.admit("then", 1, 0.0)
        for _ in range(7):
            policy.touch("then", 0.0)
        policy.admit("now", 1, 0.0)
        for _ in range(4):
            policy.touch("now", 0.0)
        return policy.victims(count=1).keys[0]

    assert leaves_first(halve_every=1000) == "now"  # 8 uses against 5
    assert leaves_first(halve_every=8) == "then"  # halved once: 4 against 5


def test_a_past_is_ordered_by_uses_and_then_by_the_latest_use() -> None:
    policy: Lfu[str] = Lfu()
    policy.restore(
        [Usage("often", 1, 0.0, 1.0, 5), Usage("once, lately", 1, 0.0, 9.0, 1), Usage("once", 1, 0.0, 2.0, 1)]
    )
    assert policy.victims(count=3).keys == ("once", "once, lately", "often")
    policy.touch("once", 10.0)
    assert policy.victims(count=3).keys == ("once, lately", "once", "often")


@pytest.mark.parametrize("halve_every", [0, -3])
def test_ageing_needs_a_positive_number_of_uses(halve_every: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"LfuConfig\.halve_every={halve_every} "):
        LfuConfig(halve_every)
