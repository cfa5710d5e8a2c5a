"""Each of the five sets is checked against the others, and each check is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.method import Unit
from kvstrata.contract.unit_expansion import EXPANSION, UnitExpansion
from kvstrata.errors import Reason, RetrievalError

module: Any = import_module("kvstrata.contract.unit_expansion")
PAGES = UnitExpansion(Unit.PAGE, 4, 8, (3, 1, 0), (3, 1), (6, 7, 2, 3), (0,), (0, 2, 3, 6, 7), (0, 2))

WRONG: dict[str, tuple[dict[str, Any], Reason, str]] = {
    "candidates_indexed": ({"candidates": (3, 1, 4)}, Reason.CANDIDATE_NOT_INDEXED, "candidates"),
    "candidates_distinct": ({"candidates": (3, 1, 3)}, Reason.DUPLICATE_CANDIDATE, "candidates"),
    "selected_are_candidates": ({"selected": (3, 2)}, Reason.SELECTED_NOT_CANDIDATE, "selected"),
    "persistent_in_history": ({"persistent": (0, 8)}, Reason.ROW_OUT_OF_SUPPORT, "persistent"),
    "resident_in_history": ({"resident": (-1,)}, Reason.ROW_OUT_OF_SUPPORT, "resident"),
    "support_distinct": ({"support": (0, 0, 2, 3, 6, 7)}, Reason.SUPPORT_NOT_DEDUPLICATED, "support"),
    "support_follows": ({"support": (0, 2, 3, 6)}, Reason.UNIT_EXPANSION_MISMATCH, "support"),
    "support_in_history": (
        {"expanded": (6, 8, 2, 3), "support": (0, 2, 3, 6, 8)},
        Reason.ROW_OUT_OF_SUPPORT,
        "support",
    ),
}


def _refusal(call: Callable[[], object]) -> tuple[Reason, str] | None:
    try:
        call()
    except RetrievalError as error:
        return error.reason, error.field
    return None


@pytest.mark.parametrize("check", WRONG)
def test_each_check_refuses_and_is_needed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reason, field = WRONG[check]
    with pytest.raises(RetrievalError) as caught:
        replace(PAGES, **changes)
    assert (caught.value.reason, caught.value.field) == (reason, f"expansion.{field}")
    monkeypatch.setattr(module, "EXPANSION", tuple(one for one in EXPANSION if one.__name__ != check))
    assert _refusal(lambda: replace(PAGES, **changes)) != (reason, f"expansion.{field}")


def test_the_table_has_every_check() -> None:
    assert list(WRONG) == [check.__name__ for check in EXPANSION]


def test_a_row_that_nothing_names_is_refused_too() -> None:
    with pytest.raises(RetrievalError, match=r"rows \[\] are missing, rows \[5\] were not named"):
        replace(PAGES, support=(0, 2, 3, 5, 6, 7))


def test_ratio_and_what_moves() -> None:
    assert (PAGES.ratio, PAGES.transferred) == (2.0, (3, 6, 7))
    empty = UnitExpansion(Unit.ROW, 8, 8, (), (), (), (0,), (0,))
    assert (empty.ratio, empty.transferred) == (0.0, (0,))


@given(st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)))
def test_the_union_of_units_and_persistent_rows_is_accepted(
    chosen: set[int], persistent: set[int], resident: set[int]
) -> None:
    rows = tuple(chosen)
    record = UnitExpansion(
        Unit.ROW, 16, 16, rows, rows, rows, tuple(persistent), tuple(sorted(chosen | persistent)), tuple(resident)
    )
    assert set(record.transferred) == (chosen | persistent) - resident
