from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.methods.row_pool import COUNTER_LIMIT, PoolPolicy, RowPool, pool_recall
from kvstrata.methods.selection import NO_UNIT

ALL = tuple(PoolPolicy)


def _held(pool: RowPool) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in pool.present]


class PlainPool:
    """One head, one row at a time, as the rule is told."""

    def __init__(self, policy: PoolPolicy, rows: int) -> None:
        self.policy, self.rows = policy, rows
        self.held: dict[int, int] = {}
        self.size = self.moment = 0

    def admit(self, count: int) -> None:
        self.moment += 1
        for _ in range(count):
            if len(self.held) == min(self.rows, self.size + 1):
                rank = (lambda row: (0, row)) if self.policy is PoolPolicy.FIFO else (lambda row: (self.held[row], row))
                del self.held[min(self.held, key=rank)]
            self.held[self.size] = self.moment if self.policy is PoolPolicy.LRU else 0
            self.size += 1

    def use(self, rows: list[int]) -> None:
        self.moment += 1
        for row in rows:
            self.held[row] = self.held[row] + 1 if self.policy is PoolPolicy.COUNTER else self.moment


@given(st.data())
def test_pool_holds_what_the_plain_rule_holds(data: st.DataObject) -> None:
    policy, rows = data.draw(st.sampled_from(ALL)), data.draw(st.integers(1, 6))
    pool = RowPool(2, policy, rows=rows)
    plain = [PlainPool(policy, rows), PlainPool(policy, rows)]
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(0, 5))
        pool.admit(count)
        for head in plain:
            if count:
                head.admit(count)
        if data.draw(st.booleans()) and pool.size:
            used = [data.draw(st.lists(st.sampled_from(sorted(head.held)), unique=True)) for head in plain]
            width = max(map(len, used))
            pool.use(torch.tensor([row + [NO_UNIT] * (width - len(row)) for row in used], dtype=torch.int64))
            for head, row in zip(plain, used, strict=True):
                head.use(row)
        assert _held(pool) == [sorted(head.held) for head in plain]
        assert all(len(row) == pool.capacity for row in _held(pool))


@pytest.mark.parametrize("policy", ALL)
def test_room_for_everything_keeps_everything_and_no_counters(policy: PoolPolicy) -> None:
    pool = RowPool(3, policy)
    pool.admit(5)
    pool.use(torch.tensor([[0], [1], [2]]))
    pool.admit(1)
    assert not pool.bounded
    assert _held(pool) == [[0, 1, 2, 3, 4, 5]] * 3
    assert pool.nbytes == 0
    assert pool.capacity == 6


def test_policies_choose_different_victims() -> None:
    used = {PoolPolicy.COUNTER: [0, 2, 3], PoolPolicy.FIFO: [1, 2, 3], PoolPolicy.LRU: [0, 1, 3]}
    for policy, expected in used.items():
        pool = RowPool(1, policy, rows=3)
        pool.admit(3)
        for rows in ([0, 2], [2], [0, 1]):  # row 1 was used least, 2 longest ago
            pool.use(torch.tensor([rows]))
        pool.admit(1)
        assert _held(pool) == [expected]


def test_a_full_counter_halves_those_of_its_head_alone() -> None:
    pool = RowPool(2, PoolPolicy.COUNTER, rows=3)
    pool.admit(3)
    for _ in range(COUNTER_LIMIT):
        pool.use(torch.tensor([[0, 1], [1, NO_UNIT]]))
    pool.use(torch.tensor([[2], [0]]))
    pool.admit(1)
    assert _held(pool) == [[0, 1, 3], [0, 1, 3]]
    for _ in range(COUNTER_LIMIT // 2):  # more than half of what the others had
        pool.use(torch.tensor([[3], [3]]))
    pool.use(torch.tensor([[3], [3]]))
    pool.use(torch.tensor([[1], [1]]))
    pool.admit(1)
    assert _held(pool) == [[1, 3, 4], [1, 3, 4]]


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(("share", "rows", "size", "capacity"), [(0.5, None, 9, 4), (0.5, 3, 9, 3), (0.1, None, 3, 1)])
def test_capacity(policy: PoolPolicy, share: float, rows: int | None, size: int, capacity: int) -> None:
    whole, single = (RowPool(2, policy, share, rows) for _ in range(2))
    whole.admit(size)
    for _ in range(size):
        single.admit(1)
    assert whole.capacity == capacity
    assert _held(whole) == _held(single) == [list(range(size - capacity, size))] * 2


def test_query_heads_count_for_their_kv_head() -> None:
    pool = RowPool(2, PoolPolicy.COUNTER, rows=3)
    pool.admit(3)
    pool.use(torch.tensor([[0, 1], [0, NO_UNIT], [2, 1], [2, 0]]))
    pool.use(torch.tensor([[1], [2], [0], [1]]))
    pool.admit(1)
    assert _held(pool) == [[0, 1, 3], [1, 2, 3]]


@pytest.mark.parametrize("policy", ALL)
def test_rows_taken_back_are_forgotten(policy: PoolPolicy) -> None:
    pool = RowPool(1, policy, rows=2)
    pool.admit(4)
    pool.truncate(3)
    assert pool.size == 3
    assert _held(pool) == [[2]]
    pool.admit(1)
    assert _held(pool) == [[2, 3]]


def test_heads_that_differ_in_size_end_at_the_same_capacity() -> None:
    pool = RowPool(2, PoolPolicy.COUNTER, rows=3)
    pool.admit(3)
    pool.use(torch.tensor([[0, 1], [1, 2]]))
    pool.admit(1)
    assert _held(pool) == [[0, 1, 3], [1, 2, 3]]
    pool.truncate(2)
    assert _held(pool) == [[0, 1], [1]]
    pool.admit(2)
    assert _held(pool) == [[0, 1, 3], [1, 2, 3]]


def test_recall_of_the_pool() -> None:
    pool = RowPool(2, PoolPolicy.FIFO, rows=4)
    pool.admit(8)
    wanted = torch.tensor([[7, 6, 0, 1], [4, NO_UNIT, NO_UNIT, NO_UNIT]])
    assert pool_recall(pool, wanted).tolist() == [0.5, 1.0]
    four = torch.tensor([[0, 7], [5, 6], [1, 2], [NO_UNIT, NO_UNIT]])
    assert pool_recall(pool, four).tolist() == [0.5, 1.0, 0.0, 1.0]
    assert pool_recall(pool, torch.empty(2, 0, dtype=torch.int64)).tolist() == [1.0, 1.0]
    unbounded = RowPool(2)
    unbounded.admit(8)
    assert pool_recall(unbounded, wanted).tolist() == [1.0, 1.0]
