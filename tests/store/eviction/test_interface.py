"""What all policies have in common: who may call what, how many victims there are, and what a bad call gets."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstrata.errors import ConfigurationError, StateError
from kvstrata.store.eviction import POLICIES, Usage, make_policy

NAMES = sorted(POLICIES)


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Any:
    """Three keys of 10, 20 and 30 bytes, admitted in that order and alike otherwise."""
    policy = make_policy(request.param)
    for number, key in enumerate(("ten", "twenty", "thirty")):
        policy.admit(key, 10 * (number + 1), float(number), saving_s=10.0 * (number + 1))
    return policy


def test_victims_are_as_many_as_asked_for(policy: Any) -> None:
    def asked(**need: int) -> tuple[int, int, bool]:
        found = policy.victims(**need)
        return len(found.keys), found.nbytes, found.sufficient

    assert asked(count=2) == (2, 30, True)
    assert asked(nbytes=10) == (1, 10, True)
    assert asked(nbytes=11) == (2, 30, True)
    assert asked(count=1, nbytes=31) == (3, 60, True)
    assert asked(count=3, nbytes=1) == (3, 60, True)
    assert asked(nbytes=61) == (3, 60, False)
    assert asked(count=4) == (3, 60, False)


def test_asking_removes_nothing_and_answers_the_same_twice(policy: Any) -> None:
    assert policy.victims(count=3) == policy.victims(count=3)
    assert len(policy) == 3


def test_what_is_pinned_is_passed_over(policy: Any) -> None:
    found = policy.victims(count=3, pinned=lambda key: key == "ten")
    assert (found.keys, found.nbytes, found.sufficient) == (("twenty", "thirty"), 50, False)
    assert policy.victims(count=1).keys == ("ten",)


def test_a_pin_that_raises_leaves_the_order_whole(policy: Any) -> None:
    def fail(key: str) -> bool:
        raise RuntimeError(key)

    with pytest.raises(RuntimeError, match="ten"):
        policy.victims(count=1, pinned=fail)
    assert policy.victims(count=3).keys == ("ten", "twenty", "thirty")


def test_a_key_that_was_removed_may_come_again(policy: Any) -> None:
    policy.remove("ten")
    assert "ten" not in policy
    assert policy.victims(count=3).keys == ("twenty", "thirty")
    policy.admit("ten", 5, 9.0, saving_s=5.0)
    assert policy.victims(count=3).nbytes == 55


@pytest.mark.parametrize("need", [{}, {"count": 0}, {"count": -1}, {"nbytes": -5, "count": 1}])
def test_a_need_that_cannot_be_is_refused(policy: Any, need: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=f"count={need.get('count', 0)} and nbytes={need.get('nbytes', 0)}"):
        policy.victims(**need)


def test_calls_out_of_order_are_refused(policy: Any) -> None:
    with pytest.raises(StateError, match="'ten' is admitted already"):
        policy.admit("ten", 1, 5.0)
    for call in (lambda: policy.touch("forty", 5.0), lambda: policy.remove("forty")):
        with pytest.raises(StateError, match="'forty' is not admitted"):
            call()
    with pytest.raises(StateError, match="this one has 3 keys"):
        policy.restore([])
    assert policy.victims(count=3).keys == ("ten", "twenty", "thirty")


def test_a_past_with_one_key_twice_is_refused(policy: Any) -> None:
    with pytest.raises(StateError, match="'a' is admitted already"):
        make_policy(policy.config).restore([Usage("a", 1, 0.0, 0.0), Usage("a", 1, 0.0, 1.0)])


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_size_that_cannot_be_is_refused(policy: Any, nbytes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"nbytes={nbytes} must be positive"):
        policy.admit("new", nbytes, 5.0)
    assert "new" not in policy
    assert len(policy) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nbytes", 0),
        ("uses", 0),
        ("created", math.nan),
        ("last_used", math.inf),
        ("saving_s", math.nan),
        ("saving_s", -math.inf),
    ],
)
def test_a_past_that_cannot_be_is_refused(field: str, value: float) -> None:
    sound: dict[str, Any] = {"key": "a", "nbytes": 1, "created": 0.0, "last_used": 0.0}
    with pytest.raises(ConfigurationError, match=rf"Usage\.{field}={value} "):
        Usage(**{**sound, field: value})
