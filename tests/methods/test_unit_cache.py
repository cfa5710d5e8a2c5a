from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.methods.unit_cache import UnitCache, UnitCacheOutcome, UnitCachePolicy


def test_the_least_recently_chosen_leaves() -> None:
    cache = UnitCache(3, UnitCachePolicy.LRU)
    assert cache.take([0, 1]) == UnitCacheOutcome(0, 2, ())
    assert cache.take([2, 0]) == UnitCacheOutcome(1, 1, ())
    assert cache.take([3]) == UnitCacheOutcome(0, 1, (1,))
    assert cache.take([4, 2]) == UnitCacheOutcome(1, 1, (0,))
    assert cache.resident == {2, 3, 4}
    assert (cache.hits, cache.misses, cache.evictions) == (2, 5, 2)


def test_scores_add_up_and_decay() -> None:
    cache = UnitCache(2, UnitCachePolicy.SCORE, decay=0.5)
    cache.take([0, 1], [8.0, 1.0])
    cache.take([1], [2.0])
    assert (cache.worth(0), cache.worth(1)) == (4.0, 2.5)
    assert cache.take([2], [0.1]).evicted == (1,)
    assert (cache.worth(0), cache.worth(2)) == (2.0, 0.1)


def test_in_the_codes_variant_a_choice_begins_at_zero() -> None:
    cache = UnitCache(2, UnitCachePolicy.SCORE_RESET, decay=0.5)
    cache.take([0, 1], [8.0, 1.0])
    cache.take([1], [2.0])
    assert (cache.worth(0), cache.worth(1)) == (4.0, 2.0)
    cache.take([0], [1.0])
    assert (cache.worth(0), cache.worth(1)) == (1.0, 1.0)
    assert cache.take([2], [0.1]).evicted == (0,)


def test_what_is_chosen_stays_and_what_has_no_place_is_passed_over() -> None:
    cache = UnitCache(2, UnitCachePolicy.SCORE)
    cache.take([7, 8], [5.0, 5.0])
    assert cache.take([1, 2, 7], [0.0, float("nan"), 9.0]) == UnitCacheOutcome(1, 2, (7, 8), passed=1)
    assert cache.resident == {1, 2}
    assert cache.worth(2) == 0.0
    cache.forget(2)
    assert cache.resident == {1}


@given(
    capacity=st.integers(1, 5),
    policy=st.sampled_from(list(UnitCachePolicy)),
    steps=st.lists(st.lists(st.integers(0, 9), unique=True, max_size=8), max_size=12),
)
def test_the_account_adds_up(capacity: int, policy: UnitCachePolicy, steps: list[list[int]]) -> None:
    cache = UnitCache(capacity, policy, decay=0.3)
    for units in steps:
        before = cache.resident
        outcome = cache.take(units, [float(unit) for unit in units])
        assert len(cache.resident) <= capacity
        assert outcome.hits == len(before & set(units))
        assert outcome.hits + outcome.misses == len(units)
        assert set(units[:capacity]) <= cache.resident
        assert cache.resident == (before | set(units[:capacity])) - set(outcome.evicted)
        assert not set(outcome.evicted) & set(units[:capacity])
        assert outcome.passed == max(0, len(units) - capacity)
    assert cache.hits + cache.misses == sum(map(len, steps))
    with pytest.raises(KeyError):
        cache.worth(10)
