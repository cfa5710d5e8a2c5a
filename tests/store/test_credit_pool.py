"""Credits are taken whole, given back once, and a leak shows."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cost.credits import Credit, Credits
from kvstrata.errors import Reason, StateError
from kvstrata.store.credit_pool import CreditPool, Reservation

TEN = Credits(10, 10, 10, 10)


def take(pool: CreditPool, amount: Credits, owner: object = "owner") -> Reservation:
    taken = pool.reserve((owner, amount))
    assert not isinstance(taken, Credit)
    return taken[0]


def test_taken_and_given_back() -> None:
    pool = CreditPool(TEN)
    held = take(pool, Credits(1, 2, 3, 4))
    assert (pool.free, pool.reserved) == (Credits(9, 8, 7, 6), Credits(1, 2, 3, 4))
    assert pool.outstanding == (held,)
    pool.release(held)
    assert (pool.free, pool.outstanding) == (TEN, ())


def test_a_second_release_is_refused() -> None:
    pool = CreditPool(TEN)
    held, other = take(pool, Credits(1)), take(pool, Credits(2))
    pool.release(held)
    with pytest.raises(StateError, match="released before") as refusal:
        pool.release(held)
    assert refusal.value.reason is Reason.NOT_COMMITTED
    assert (pool.free, pool.outstanding) == (Credits(8, 10, 10, 10), (other,))
    assert pool.give_back(held) is False
    assert pool.give_back(other) is True


def test_another_pool_is_not_given_to() -> None:
    pool, other = CreditPool(TEN), CreditPool(TEN)
    held = take(other, Credits(5))
    take(pool, Credits(5))
    with pytest.raises(StateError):
        pool.release(held)
    assert pool.free == Credits(5, 10, 10, 10)


def test_several_owners_get_all_or_nothing() -> None:
    pool = CreditPool(TEN)
    assert pool.reserve(("a", Credits(pinned=6)), ("b", Credits(pinned=5))) is Credit.PINNED
    assert (pool.free, pool.outstanding) == (TEN, ())
    taken = pool.reserve(("a", Credits(pinned=6)), ("b", Credits(staging=10)))
    assert isinstance(taken, tuple)
    assert [each.owner for each in taken] == ["a", "b"]
    pool.release(taken[1])
    assert pool.free == Credits(4, 10, 10, 10)


def test_a_release_before_the_wait_is_not_missed() -> None:
    pool = CreditPool(TEN)
    held, seen = take(pool, TEN), pool.releases
    pool.release(held)
    assert pool.wait(seen, 60.0) is True
    assert pool.wait(pool.releases, 0.0) is False


def test_a_release_wakes_who_waits() -> None:
    pool = CreditPool(TEN)
    held, seen = take(pool, TEN), pool.releases
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(pool.wait(seen, 60.0)))
    thread.start()
    pool.release(held)
    thread.join()
    assert woken == [True]


def test_reclaim_takes_what_was_orphaned_and_counts_anew() -> None:
    pool = CreditPool(TEN)
    kept = take(pool, Credits(1), "kept")
    take(pool, Credits(4), "orphan")
    pool._free = Credits(0, 0, 0, 0)  # interrupted between two lines
    assert pool.reclaim(lambda owner: owner == "orphan") == 1
    assert (pool.free, pool.outstanding) == (Credits(9, 10, 10, 10), (kept,))


@given(st.lists(st.tuples(st.booleans(), st.builds(Credits, *[st.integers(0, 6)] * 4)), max_size=40))
def test_free_and_held_are_always_the_total(steps: list[tuple[bool, Credits]]) -> None:
    pool, held = CreditPool(TEN), []
    for give_back, amount in steps:
        if give_back and held:
            pool.release(held.pop(0))
        else:
            taken = pool.reserve((object(), amount))
            if isinstance(taken, tuple):
                held.append(taken[0])
        total = pool.free
        for each in held:
            total += each.amount
        assert total == TEN
        assert pool.outstanding == tuple(held)
