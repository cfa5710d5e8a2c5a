from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.contract.budget import Persistent
from kvstrata.contract.method import Owner
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.indexless import IndexlessMethod
from kvstrata.methods.interface import Geometry, Index, MethodContext, StepRows
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.methods.streaming import Streaming
from kvstrata.placement.expansion import Support, expand

GEOMETRY = Geometry(1, 6, 2, 8, 1.0, (None,))
NONE = Persistent(0, 1)


class Listed(IndexlessMethod):
    """Units with members as listed, which may overlap; the frame must bear what a method should not do."""

    contract = Streaming.contract
    members: Tensor

    def select(self, ctx: MethodContext, layer: int, index: Index, rows: StepRows) -> Selection:
        raise NotImplementedError

    def rows_of(self, index: Index, units: Tensor) -> Tensor:
        return self.members[units].flatten(1)  # NO_UNIT gives the members of the last unit: no rows of this owner


def _listed(*members: list[int]) -> Listed:
    width = max(map(len, members))
    method = Listed()
    filled = torch.tensor([[*unit, *[NO_UNIT] * (width - len(unit))] for unit in members])
    object.__setattr__(method, "members", filled)
    return method


def _selection(units: list[list[int]], log_bias: Tensor | None = None) -> Selection:
    owner = {6: Owner.QUERY_HEAD, 2: Owner.KV_HEAD, 1: Owner.LAYER}[len(units)]
    return Selection(owner, torch.tensor(units, dtype=torch.int64).view(len(units), -1), 9, log_bias=log_bias)


def _rows(support: Support) -> list[list[int]]:
    return [[row for row in rows if row != NO_UNIT] for rows in support.rows.tolist()]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Listed, Selection, Persistent, int]:
    """Overlapping ragged units over some rows, lists of different lengths, a bias for each head and unit."""
    visible = draw(st.integers(1, 30))
    positions = st.lists(st.integers(0, visible - 1), max_size=5)
    members = draw(st.lists(positions, min_size=1, max_size=8))
    members[0] = members[0] or [0]
    owners, width = draw(st.sampled_from([6, 2, 1])), draw(st.integers(0, 4))
    units = []
    for _ in range(owners):
        named = draw(st.lists(st.integers(0, len(members) - 1), unique=True, max_size=width))
        units.append(named + [NO_UNIT] * (width - len(named)))
    bias = torch.arange(6.0 * width).view(6, width) / 7 if draw(st.booleans()) else None
    persistent = Persistent(draw(st.integers(0, 6)), draw(st.integers(1, 9)))
    return _listed(*members), _selection(units, bias), persistent, visible


@given(cases())
def test_support_is_the_set_of_chosen_and_persistent_rows(case: tuple[Listed, Selection, Persistent, int]) -> None:
    method, selection, persistent, visible = case
    support = expand(method, Index(), selection, GEOMETRY, persistent, visible)
    sinks, recent = persistent.bounds(visible)
    assert (support.sinks, support.recent, support.visible) == (sinks, recent, visible)
    named = 0
    for owner, units in enumerate(selection.units.tolist()):
        # Each row with the first unit that brings it.
        first: dict[int, int] = {}
        for column, unit in enumerate(units):
            for row in method.members[unit].tolist() if unit != NO_UNIT else ():
                if row != NO_UNIT:
                    named += 1
                    first.setdefault(row, column)
        expected = {row: column for row, column in first.items() if sinks <= row < recent}
        mine = support.rows[owner] != NO_UNIT
        rows, columns = support.rows[owner][mine].tolist(), support.columns[owner][mine].tolist()
        assert dict(zip(rows, columns, strict=True)) == expected
        assert len(rows) == len(expected)
        listed = method.rows_of(Index(), selection.units)[owner]
        assert listed[support.order[owner][mine]].tolist() == rows
        assert int(support.counts[owner]) == len(expected) + sinks + visible - recent
        for head in range(owner * 6 // len(selection.units), (owner + 1) * 6 // len(selection.units)):
            if selection.log_bias is not None:
                assert support.log_bias is not None
                wanted = [float(selection.log_bias[head, column]) for column in columns]
                assert support.log_bias[head][mine].tolist() == wanted
                assert not bool(support.log_bias[head][~mine].any())
    assert support.named == named
    assert support.duplicates == named - sum(map(len, _rows(support)))
    # No column is filler for every owner.
    assert support.rows.shape[1] == max(map(len, _rows(support)))


def test_rows_are_units_unless_a_method_says_otherwise() -> None:
    selection = _selection([[7, 2, 5], [2, NO_UNIT, NO_UNIT]])
    support = expand(Streaming(), Index(), selection, GEOMETRY, Persistent(0, 2), 10)
    assert _rows(support) == [[2, 5, 7], [2]]
    assert support.columns[0].tolist() == [1, 2, 0]
    assert (support.named, support.duplicates) == (4, 0)
    assert support.counts.tolist() == [5, 3]


def test_rows_that_a_unit_shares_with_another_or_with_the_persistent_ones_enter_once() -> None:
    method = _listed([0, 1, 2], [2, 3], [3, 9])
    support = expand(method, Index(), _selection([[1, 0, 2]]), GEOMETRY, Persistent(1, 1), 10)
    assert _rows(support) == [[1, 2, 3]]
    assert support.columns.tolist() == [[1, 0, 0]]  # rows 2 and 3 came with unit 1, which stands first
    assert (support.named, support.duplicates) == (7, 4)


def test_an_owner_without_units_has_no_rows_of_anothers() -> None:
    method = _listed([1], [2], [3])
    support = expand(method, Index(), _selection([[0, NO_UNIT], [NO_UNIT, NO_UNIT]]), GEOMETRY, NONE, 9)
    assert _rows(support) == [[1], []]


def test_nothing_chosen() -> None:
    for selection in (Selection.none(Owner.KV_HEAD, 2), _selection([[NO_UNIT]])):
        support = expand(Streaming(), Index(), selection, GEOMETRY, Persistent(2, 3), 9)
        assert support.rows.shape == (len(selection.units), 0)
        assert support.counts.tolist() == [5] * len(selection.units)


def test_recent_rows_of_a_step_begin_before_its_first_row() -> None:
    """Its three rows see 7, 8 and 9 rows, and the last two of these always: 5 and 6, 6 and 7, 7 and 8."""
    selection = _selection([[1, 4, 5, 6, 8]])
    support = expand(Streaming(), Index(), selection, GEOMETRY, Persistent(1, 2), 9, first=7)
    assert (support.sinks, support.recent, support.visible) == (1, 5, 9)
    assert _rows(support) == [[1, 4]]
    assert _rows(expand(Streaming(), Index(), selection, GEOMETRY, Persistent(1, 2), 9)) == [[1, 4, 5, 6]]
    # Sinks and recent rows cannot cross in the view of the first row either.
    support = expand(Streaming(), Index(), selection, GEOMETRY, Persistent(4, 2), 9, first=3)
    assert (support.sinks, support.recent) == (1, 1)
    assert _rows(support) == [[]]


def test_without_chosen_leaves_the_persistent_rows() -> None:
    selection = _selection([[3, 4], [5, NO_UNIT]], torch.zeros(6, 2))
    support = expand(Streaming(), Index(), selection, GEOMETRY, Persistent(2, 3), 9).without_chosen()
    assert support.rows.shape == support.columns.shape == support.order.shape == (2, 0)
    assert support.log_bias is None
    assert support.counts.tolist() == [5, 5]


def test_a_bias_of_a_unit_that_is_wholly_persistent_is_not_looked_at() -> None:
    bias = torch.zeros(6, 2)
    bias[:, 0] = math.inf
    support = expand(Streaming(), Index(), _selection([[0, 4]], bias), GEOMETRY, Persistent(2, 3), 9)
    assert _rows(support) == [[4]]
    assert support.log_bias is not None
    assert support.log_bias.tolist() == [[0.0]] * 6


class Wrong(Listed):
    def rows_of(self, index: Index, units: Tensor) -> Tensor:
        return self.members


def _wrong(rows: Tensor) -> Wrong:
    method = Wrong()
    object.__setattr__(method, "members", rows)
    return method


@pytest.mark.parametrize(
    ("method", "selection", "reason", "message"),
    [
        (
            Streaming(),
            replace(_selection([[1], [2]]), owner=Owner.QUERY_HEAD),
            Reason.GQA_OWNERSHIP_MISMATCH,
            r"units of shape \(2, 1\) for 6 owners \(query_head\)",
        ),
        (
            Streaming(),
            replace(_selection([[1], [2]]), units=torch.tensor([1, 2])),
            Reason.GQA_OWNERSHIP_MISMATCH,
            r"units of shape \(2,\)",
        ),
        (
            Streaming(),
            _selection([[1, NO_UNIT, NO_UNIT], [2, 3, 2]]),
            Reason.DUPLICATE_CANDIDATE,
            "a unit was chosen twice",
        ),
        (
            Streaming(),
            _selection([[1, 10], [2, 3]]),
            Reason.CANDIDATE_BEYOND_FRONTIER,
            "rows from 1 to 10 were chosen of 10",
        ),
        (
            Streaming(),
            _selection([[1, -2], [2, 3]]),
            Reason.CANDIDATE_BEYOND_FRONTIER,
            "rows from -2 to 3 were chosen of 10",
        ),
        (
            _wrong(torch.zeros(2, 3, dtype=torch.int64)),
            _selection([[1, 4], [2, 3]]),
            Reason.CANDIDATE_IDS_NOT_ROWS,
            r"rows of shape \(2, 3\) for units of shape \(2, 2\)",
        ),
        (
            _wrong(torch.zeros(6, 2, dtype=torch.int64)),
            _selection([[1, 4], [2, 3]]),
            Reason.CANDIDATE_IDS_NOT_ROWS,
            r"rows of shape \(6, 2\)",
        ),
        (
            _wrong(torch.zeros(1, 4, dtype=torch.int64)),
            _selection([[]]),
            Reason.CANDIDATE_IDS_NOT_ROWS,
            r"rows of shape \(1, 4\) for units of shape \(1, 0\)",
        ),
        (
            Streaming(),
            _selection([[1, 4], [2, 3]], torch.zeros(2, 2)),
            Reason.GEOMETRY_MISMATCH,
            r"a log-bias of shape \(2, 2\) for 6 heads and 2 units",
        ),
        (
            Streaming(),
            _selection([[1, 4], [2, 3]], torch.full((6, 2), math.nan)),
            Reason.GEOMETRY_MISMATCH,
            "a log-bias is not finite",
        ),
        (
            Streaming(),
            _selection([[1, 4], [2, 3]], torch.full((6, 2), -math.inf)),
            Reason.GEOMETRY_MISMATCH,
            "a log-bias is not finite",
        ),
    ],
)
def test_what_does_not_fit_is_refused(method: Listed, selection: Selection, reason: Reason, message: str) -> None:
    with pytest.raises(RetrievalError, match=message) as refused:
        expand(method, Index(), selection, GEOMETRY, NONE, 10)
    assert refused.value.reason is reason
    assert refused.value.field.startswith("selection.")
