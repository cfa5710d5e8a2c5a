from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.contract.budget import EstimatedMass, Fraction, Rows, SelectionBudget, Threshold
from kvstrata.contract.method import GroupSharing
from kvstrata.errors import ConfigurationError
from kvstrata.methods.choosing import choose, share_scores, top_units
from kvstrata.methods.selection import NO_UNIT

INF = math.inf
# Few values, so that ties are common; far apart ones, so that shares underflow.
values = st.sampled_from([-INF, -200.0, -1.5, -0.0, 0.0, 0.25, 3.0, 90.0])


@st.composite
def scored(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores [owners, units] and rows of the units, [units] or [owners, units]."""
    owners, units = draw(st.integers(1, 4)), draw(st.integers(0, 12))
    scores = [draw(st.lists(values, min_size=units, max_size=units)) for _ in range(owners)]
    sizes = st.lists(st.integers(0, 9), min_size=units, max_size=units)
    rows = draw(sizes) if draw(st.booleans()) else [draw(sizes) for _ in range(owners)]
    return torch.tensor(scores).view(owners, units), torch.tensor(rows, dtype=torch.int64)


budgets = st.one_of(
    st.builds(Rows, st.integers(1, 9)),
    st.builds(Fraction, st.floats(0.1, 1)),
    st.builds(Threshold, st.sampled_from([0.0, 0.25, 3.0, 500.0]), st.integers(1, 9)),
    st.builds(EstimatedMass, st.sampled_from([0.01, 0.5, 0.999, 1.0]), st.integers(1, 9)),
)


def _reference(scores: list[float], rows: list[int], budget: SelectionBudget, allowance: int) -> tuple[list[int], bool]:
    """One owner, unit by unit, in Python's floats."""
    order = sorted((unit for unit, score in enumerate(scores) if score > -INF), key=lambda unit: (-scores[unit], unit))
    if isinstance(budget, Threshold):
        order = [unit for unit in order if scores[unit] >= scores[order[0]] - budget.margin]
    if isinstance(budget, EstimatedMass) and budget.mass < 1:
        weights = {unit: math.exp(scores[unit] - scores[order[0]]) for unit in order}
        reached, wanted = 0.0, []
        for unit in order:
            if reached >= budget.mass * math.fsum(weights.values()):
                break
            wanted.append(unit)
            reached += weights[unit]
        order = wanted
    taken: list[int] = []
    for unit in order:
        if sum(rows[one] for one in taken) + rows[unit] > allowance:
            break
        taken.append(unit)
    return taken, isinstance(budget, Threshold | EstimatedMass) and len(taken) < len(order)


@given(scored(), budgets, st.integers(0, 60))
def test_choice_is_that_of_the_reference(case: tuple[Tensor, Tensor], budget: SelectionBudget, allowance: int) -> None:
    scores, rows = case
    chosen = choose(scores, rows, budget, allowance)
    expected = [
        _reference(scores[owner].tolist(), rows.expand_as(scores)[owner].tolist(), budget, allowance)
        for owner in range(scores.shape[0])
    ]
    assert [[unit for unit in row if unit != NO_UNIT] for row in chosen.units.tolist()] == [
        units for units, _ in expected
    ]
    assert chosen.capped == any(capped for _, capped in expected)
    assert chosen.units.shape[1] == max(len(units) for units, _ in expected)
    assert chosen.units.dtype is torch.int64


@given(scored(), budgets, st.integers(0, 60), st.integers(0, 60))
def test_less_allowance_takes_a_prefix(
    case: tuple[Tensor, Tensor], budget: SelectionBudget, one: int, other: int
) -> None:
    scores, rows = case
    small, large = (choose(scores, rows, budget, allowance).units for allowance in sorted((one, other)))
    for few, many in zip(small.tolist(), large.tolist(), strict=True):
        real = [unit for unit in few if unit != NO_UNIT]
        assert many[: len(real)] == real


@given(scored(), budgets, st.integers(0, 60))
def test_fillers_come_last_and_no_unit_twice(
    case: tuple[Tensor, Tensor], budget: SelectionBudget, allowance: int
) -> None:
    scores, rows = case
    for row in choose(scores, rows, budget, allowance).units.tolist():
        real = [unit for unit in row if unit != NO_UNIT]
        assert row == real + [NO_UNIT] * (len(row) - len(real))
        assert len(set(real)) == len(real)


def test_ties_among_many_units_go_to_the_lower_ones() -> None:
    """Short lists come out right from an unstable sort as well."""
    scores = torch.randint(0, 3, (2, 20_000), generator=torch.Generator().manual_seed(0)).float()
    expected = [sorted(range(20_000), key=lambda unit: (-row[unit], unit))[:9000] for row in scores.tolist()]
    assert top_units(scores, 9000).tolist() == expected
    assert choose(scores, torch.ones(20_000, dtype=torch.int64), Rows(9000), 9000).units.tolist() == expected


def test_units_that_bring_nothing_cost_nothing() -> None:
    chosen = choose(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([0, 5, 0]), Rows(9), 5)
    assert chosen.units.tolist() == [[0, 1, 2]]
    assert choose(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([0, 5, 0]), Rows(9), 4).units.tolist() == [[0]]


def test_threshold_at_its_very_edge() -> None:
    scores, rows = torch.tensor([[5.0, 3.0, 2.999]]), torch.ones(3, dtype=torch.int64)
    assert choose(scores, rows, Threshold(2.0, cap=3), 3).units.tolist() == [[0, 1]]


def test_mass_is_that_of_the_units_that_can_be_chosen() -> None:
    """Unit 0 is believed to hold nearly all and must not be chosen: the others share the mass."""
    scores, rows = torch.tensor([[-INF, 2.0, 1.0, 0.0]]), torch.ones(4, dtype=torch.int64)
    log_mass = torch.tensor([[50.0, 0.0, 0.0, 0.0]])
    for mass, units in ((0.3, [1]), (0.34, [1, 2]), (0.99, [1, 2, 3])):
        assert choose(scores, rows, EstimatedMass(mass, cap=4), 4, log_mass).units.tolist() == [units]


def test_mass_of_one_takes_what_holds_next_to_nothing() -> None:
    scores, rows = torch.tensor([[0.0, -80.0, -500.0]]), torch.ones(3, dtype=torch.int64)
    assert choose(scores, rows, EstimatedMass(1.0, cap=3), 3).units.tolist() == [[0, 1, 2]]
    assert choose(scores, rows, EstimatedMass(0.999, cap=3), 3).units.tolist() == [[0]]


def test_owners_without_candidates() -> None:
    scores, rows = torch.tensor([[-INF, -INF], [0.0, -INF]]), torch.ones(2, dtype=torch.int64)
    for budget in (Rows(2), Threshold(1.0, cap=2), EstimatedMass(0.5, cap=2), EstimatedMass(1.0, cap=2)):
        chosen = choose(scores, rows, budget, 2)
        assert chosen.units.tolist() == [[NO_UNIT], [0]]
        assert not chosen.capped


@given(scored(), st.integers(0, 15))
def test_top_units(case: tuple[Tensor, Tensor], count: int) -> None:
    scores, _ = case
    units = top_units(scores, count)
    assert units.shape == (scores.shape[0], min(count, scores.shape[1]))
    for row, owner in zip(units.tolist(), scores.tolist(), strict=True):
        expected, _ = _reference(owner, [1] * len(owner), Rows(1), count)
        assert row == expected + [NO_UNIT] * (len(row) - len(expected))


SCORES = torch.tensor([[1.0, 2.0, 0.0], [5.0, -1.0, 3.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        (GroupSharing.SEPARATE, SCORES.tolist()),
        (GroupSharing.MAX, [[5.0, 2.0, 3.0], [1.0, 1.0, 1.0]]),
        (GroupSharing.SUM, [[6.0, 1.0, 3.0], [1.0, 1.0, 2.0]]),
        (GroupSharing.MEAN, [[3.0, 0.5, 1.5], [0.5, 0.5, 1.0]]),
    ],
)
def test_scores_of_a_group(sharing: GroupSharing, expected: list[list[float]]) -> None:
    assert share_scores(SCORES, sharing, 2).tolist() == expected
    # A view whose heads do not lie together is served as well.
    assert share_scores(SCORES.T.contiguous().T, sharing, 2).tolist() == expected


def test_softmax_sum_is_the_logarithm_of_added_shares() -> None:
    shares = torch.softmax(SCORES.double(), -1).view(2, 2, 3).sum(1)
    torch.testing.assert_close(share_scores(SCORES, GroupSharing.SOFTMAX_SUM, 2).double().exp(), shares)


def test_softmax_sum_keeps_apart_what_underflows_and_what_is_excluded() -> None:
    scores = torch.tensor([[0.0, -300.0, -200.0, -INF], [0.0, -300.0, -400.0, -INF], [-INF] * 4, [-INF] * 4])
    shared = share_scores(scores, GroupSharing.SOFTMAX_SUM, 2)
    assert top_units(shared, 4).tolist() == [[0, 2, 1, NO_UNIT], [NO_UNIT] * 4]
    assert not bool(shared.isnan().any())


@pytest.mark.parametrize(
    "sharing", [GroupSharing.SEPARATE, GroupSharing.MAX, GroupSharing.SUM, GroupSharing.SOFTMAX_SUM]
)
def test_no_units_are_shared_too(sharing: GroupSharing) -> None:
    owners = 6 if sharing is GroupSharing.SEPARATE else 2
    assert share_scores(torch.zeros(6, 0), sharing, 3).shape == (owners, 0)


@pytest.mark.parametrize("sharing", [GroupSharing.QUERY_SUM, GroupSharing.QUERY_FREE])
def test_sharings_that_are_not_about_scores(sharing: GroupSharing) -> None:
    with pytest.raises(ConfigurationError, match=f"scores cannot be shared by {sharing}"):
        share_scores(SCORES, sharing, 2)
