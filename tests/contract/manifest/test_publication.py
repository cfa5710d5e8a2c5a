from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.identity import Namespace
from kvstrata.contract.manifest import Fallback, IndexPublication, ResidentSet
from kvstrata.contract.manifest.publication import contains


def make_index(frontier: int = 8, **changes: Any) -> IndexPublication:
    return IndexPublication(
        "index", 6, "selector", 4, 23, frontier, "", "original_position", ((0, frontier),), Namespace(), **changes
    )


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))), st.integers(0, 20))
def test_a_position_is_in_the_union_of_the_ranges(ranges: list[tuple[int, int]], position: int) -> None:
    union = {p for start, stop in ranges for p in range(start, stop)}
    assert contains(tuple(ranges), position) == (position in union)


def test_an_index_covers_rows_up_to_its_frontier_only() -> None:
    assert make_index(8).covers(8)
    assert not make_index(7).covers(8)
    assert make_index(7, rest_fallback=Fallback.RECOMPUTE).covers(8)


@pytest.mark.parametrize(
    ("resident", "covers"),
    [
        (ResidentSet(6), True),
        (ResidentSet(0, 8), True),
        (ResidentSet(7), False),
        (ResidentSet(6, 7), False),
    ],
)
def test_a_resident_set_must_close_the_gap(resident: ResidentSet, covers: bool) -> None:
    assert make_index(6, resident=resident).covers(8) is covers


def test_resident_rows_may_be_named_beside_entries() -> None:
    index = make_index(6, resident=ResidentSet(6, 8))
    assert [index.may_return(p) for p in (0, 5, 6, 7, 8)] == [True, True, True, True, False]
