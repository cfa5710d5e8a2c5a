"""Every unit covers its rows once, for the product's own methods and for indexes that are wrong."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.errors import Reason, RetrievalError
from kvstrata.lab.conform.error_cost_methods import GivenUnits, MembersIndex
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.interface import Geometry
from kvstrata.methods.quest import Quest
from kvstrata.placement.unit_partition import PARTITION, require_partition, unit_members

module: Any = import_module("kvstrata.placement.unit_partition")
METHOD = GivenUnits((), (), 0)

WRONG: dict[str, tuple[list[list[int]], Reason]] = {
    "rows_indexed": ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], Reason.UNIT_PARTITION_INVALID),
    "no_overlap": ([[0, 1, 2, 3], [3, 4, 5, 6, 7]], Reason.UNIT_OVERLAP),
    "no_gap": ([[0, 1, 2, 3], [4, 5, 6]], Reason.UNIT_COVERAGE_GAP),
}


@pytest.mark.parametrize("check", WRONG)
def test_each_check_refuses_and_is_needed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members, reason = WRONG[check]
    index = MembersIndex(members, 8)
    with pytest.raises(RetrievalError) as caught:
        require_partition(METHOD, index, len(members))
    assert (caught.value.reason, caught.value.field) == (reason, "index.units")
    monkeypatch.setattr(module, "PARTITION", tuple(one for one in PARTITION if one.__name__ != check))
    require_partition(METHOD, index, len(members))


def test_the_table_has_every_check() -> None:
    assert list(WRONG) == [check.__name__ for check in PARTITION]


def test_a_row_twice_in_one_unit() -> None:
    with pytest.raises(RetrievalError, match="unit_overlap"):
        require_partition(METHOD, MembersIndex([[0, 0], [1]], 2), 2)


@given(st.integers(1, 70), st.sampled_from([1, 3, 16]))
def test_pages_of_quest_cover_their_rows_once(rows: int, page_size: int) -> None:
    geometry = Geometry(1, 2, 1, 4, 0.5, (None,))
    keys = torch.randn(1, rows, 4, generator=torch.Generator().manual_seed(rows))
    ctx = InMemoryContext(geometry, {0: (keys, keys)}, Rows(rows), Persistent(0, 1), rows)
    method = Quest(page_size=page_size)
    index = method.build(ctx, 0, None)
    pages = -(-rows // page_size)
    owners = geometry.owners(method.owner)
    require_partition(method, index, pages, owners=owners)
    assert len(unit_members(method, index, pages, owners)) == owners
