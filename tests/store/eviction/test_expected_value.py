"""Expected value: saving per byte, weighed by a decayed count of uses, as the definition says it."""

from __future__ import annotations

import itertools
import math

import pytest
from eviction_references import CALLS, Entry, Reference, replay
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cost.retention import ReuseModel, ValueTerms
from kvstrata.errors import ConfigurationError
from kvstrata.store.eviction import ExpectedValue, ExpectedValueConfig, Usage

HALF_LIFE = 50.0


def density(entry: Entry, now: float) -> float:
    """Straight from the definition: every use weighs 2^(-age / half-life)."""
    weight = sum(2.0 ** ((used - now) / HALF_LIFE) for used in entry.times)
    return weight * math.log(2) / HALF_LIFE * max(0.0, entry.saving_s) / entry.nbytes


@given(CALLS)
def test_it_agrees_with_the_definition(calls: list[tuple[str, int, int, int, float]]) -> None:
    """Exactly, but for densities that differ by less than rounding does."""
    policy: ExpectedValue[int] = ExpectedValue(ExpectedValueConfig(ReuseModel(half_life_s=HALF_LIFE)))
    reference = Reference(density)
    for now in replay(policy, reference, calls):
        keys = policy.victims(count=10).keys
        assert sorted(keys) == sorted(reference.entries)
        densities = [density(reference.entries[key], now) for key in keys]
        assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(densities))
        worthless = [key for key, value in zip(keys, densities, strict=True) if value == 0]
        assert worthless == sorted(worthless, key=lambda key: reference.entries[key].calls[-1])


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 500), st.floats(0.01, 9), st.integers(1, 9)), max_size=8))
def test_a_past_is_ordered_by_the_value_of_each_byte(past: list[tuple[int, float, float, int]]) -> None:
    """With a horizon that is short, where the probability is proportional to the rate: the V of the cost model."""
    reuse, now = ReuseModel(half_life_s=HALF_LIFE, horizon_s=1e-9), 500.0
    policy: ExpectedValue[int] = ExpectedValue(ExpectedValueConfig(reuse))
    policy.restore(
        Usage(key, nbytes, 0.0, last_used, uses, saving_s)
        for key, (uses, last_used, saving_s, nbytes) in enumerate(past)
    )
    values = []
    for key in policy.victims(count=10).keys:
        uses, last_used, saving_s, nbytes = past[key]
        terms = ValueTerms(reuse.probability(uses, now - last_used), recompute_s=saving_s + 0.25, promote_s=0.25)
        values.append(terms.value_s / nbytes)
    assert len(values) == len(past)
    assert all(low <= high * (1 + 1e-6) for low, high in itertools.pairwise(values))


def test_worked_order() -> None:
    """One use each at the same time: 8 s for 4 bytes, 3 s for 1 byte, 1 s for 1 byte, and one that saves nothing."""
    policy: ExpectedValue[str] = ExpectedValue()
    for key, nbytes, saving_s in (("2 a byte", 4, 8.0), ("3 a byte", 1, 3.0), ("1 a byte", 1, 1.0), ("none", 1, 0.0)):
        policy.admit(key, nbytes, 0.0, saving_s)
    assert policy.victims(count=4).keys == ("none", "1 a byte", "2 a byte", "3 a byte")


def test_one_use_now_outweighs_two_that_are_two_half_lives_old() -> None:
    policy: ExpectedValue[str] = ExpectedValue(ExpectedValueConfig(ReuseModel(half_life_s=HALF_LIFE)))
    policy.admit("old", 1, 0.0)
    policy.touch("old", 0.0)
    policy.admit("one half-life later", 1, 1.01 * HALF_LIFE)
    assert policy.victims(count=1).keys == ("old",)
    policy.touch("old", 1.01 * HALF_LIFE)
    assert policy.victims(count=1).keys == ("one half-life later",)


def test_a_clock_that_goes_back_counts_as_the_latest_time() -> None:
    policy: ExpectedValue[str] = ExpectedValue(ExpectedValueConfig(ReuseModel(half_life_s=1.0)))
    policy.admit("a", 1, 10.0)
    policy.admit("b", 1, 3.0)
    policy.touch("a", 0.0)
    assert policy.victims(count=2).keys == ("b", "a")


@pytest.mark.parametrize("saving_s", [math.nan, math.inf])
def test_a_saving_that_is_no_number_is_refused(saving_s: float) -> None:
    policy: ExpectedValue[str] = ExpectedValue()
    with pytest.raises(ConfigurationError, match=f"saving_s={saving_s} "):
        policy.admit("a", 1, 0.0, saving_s)
    assert "a" not in policy
