"""The heap keeps its order through outdated entries, and does not grow with them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.store.eviction.ranking import Ranking

PUTS = st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), max_size=200)


@given(PUTS, st.integers(0, 6))
def test_the_order_is_that_of_the_latest_ranks(puts: list[tuple[int, int]], read: int) -> None:
    ranking: Ranking[int] = Ranking()
    latest: dict[int, tuple[int, int]] = {}
    for number, (key, rank) in enumerate(puts):
        ranking.put(key, key + 1, rank)
        latest[key] = (rank, number)
        order = ranking.ascending()
        for _ in range(read):
            next(order, None)
        order.close()
    expected = [(key, key + 1) for key in sorted(latest, key=latest.__getitem__)]
    assert list(ranking.ascending()) == expected
    ranking.rerank(lambda key: -latest[key][0])
    turned = sorted(latest, key=lambda key: (-latest[key][0], latest[key][1]))
    assert [key for key, _ in ranking.ascending()] == turned


def test_outdated_entries_are_dropped() -> None:
    ranking: Ranking[int] = Ranking()
    for number in range(10_000):
        ranking.put(number % 100, 1, number)
    assert len(ranking._heap) <= 2 * 100 + 64
    for key in range(100):
        ranking.remove(key)
    assert len(ranking._heap) <= 64
    assert list(ranking.ascending()) == []
