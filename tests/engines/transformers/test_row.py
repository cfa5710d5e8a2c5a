"""A sequence keeps apart which columns are its rows, wherever padding stands and wherever it is cut."""

from __future__ import annotations

import pytest
from chunks_and_faults import make_context
from directory_parts import SIZE, extend, make_directory, make_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engines.transformers.row import Row
from kvstrata.store.history import History


def filled(visible: list[bool]) -> tuple[Row, list[int]]:
    """A row whose columns are its tokens where `visible` says so, and its token ids."""
    row, ids = Row(History(make_directory(slots=90), make_context())), make_ids(sum(visible))
    for start in range(0, len(ids), SIZE):
        extend(row.history, ids[start : start + SIZE])
    row.append(0, [column for column, seen in enumerate(visible) if not seen], padding=True)
    return row, ids


@settings(max_examples=60)
@given(st.integers(1, 3 * SIZE), st.sets(st.integers(0, 3 * SIZE)), st.integers(0, 3 * SIZE))
def test_a_crop_leaves_the_columns_before_it(columns: int, hidden: set[int], width: int) -> None:
    visible = [column not in hidden for column in range(columns)]
    row, ids = filled(visible)
    assert (row.width, row.frontier) == (columns, sum(visible))
    row.crop(width)
    kept = visible[:width]
    assert row.width == len(kept)
    assert row.token_ids == ids[: sum(kept)]
    assert row.padding == [column for column, seen in enumerate(kept) if not seen]
    assert row.history.frontier + len(row.owed) == sum(kept)
    assert row.history.frontier in (sum(kept), sum(kept) // SIZE * SIZE)


@pytest.mark.parametrize(("frontier", "owed"), [(SIZE + 5, 5), (2 * SIZE, 0), (2 * SIZE + 3, 0), (3, 3), (0, 0)])
def test_what_stays_of_a_sealed_chunk_is_owed(frontier: int, owed: int) -> None:
    row, ids = filled([True] * (2 * SIZE + 9))
    row.rewind(frontier)
    assert (row.frontier, row.token_ids, len(row.owed)) == (frontier, ids[:frontier], owed)
    row.rewind(max(0, frontier - 1))
    assert row.token_ids == ids[: max(0, frontier - 1)]


def test_drafts_are_held_until_they_are_kept_and_beams_for_good() -> None:
    row, _ = filled([True] * 10)
    row.draft(7)
    assert row.history.committed == 7
    row.keep_drafts()
    assert row.history.committed == 10
    row.draft(7)
    row.hold()
    row.keep_drafts()
    assert row.history.committed == 10
    extend(row.history, make_ids(4, 3))
    row.hold()
    row.keep_drafts()
    assert (row.history.committed, row.frontier) == (10, 14)


def test_a_fork_is_a_row_of_its_own() -> None:
    row, ids = filled([False, True, True, False, True])
    row.finished = True
    other = row.fork()
    assert other is not None
    row.crop(2)
    assert (other.width, other.token_ids, other.padding, other.finished) == (5, ids, [0, 3], True)
    row.close()
    assert other.token_ids == ids
