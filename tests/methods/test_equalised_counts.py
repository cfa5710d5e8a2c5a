from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_parts import golden

from kvstrata.methods.equalised_counts import (
    Comparison,
    CountRule,
    ThresholdBest,
    equalise,
    mass_counts,
    threshold_counts,
)


def _all(scores: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(scores, dtype=torch.bool)


def test_offloading_code_counts() -> None:
    arrays, facts = golden("infinigen")
    scores = arrays["spec_scores"]
    for alpha, suffix in (("alpha", ""), ("alpha_2", "_2")):
        margin = facts["parameters"][alpha]
        counts = threshold_counts(scores, _all(scores), margin, Comparison.ABOVE)
        assert torch.equal(counts, arrays[f"above_threshold{suffix}"])
        assert float(counts.double().mean()) == float(arrays[f"mean_count{suffix}"])
        cap = facts["parameters"][f"cap{suffix}"]
        kept = min(cap, equalise(counts.tolist(), CountRule.TRUNCATED_MEAN))
        assert kept == int(arrays[f"kept_count{suffix}"])


def test_accuracy_code_counts_with_the_first_heads_best_for_all() -> None:
    arrays, facts = golden("infinigen")
    margin, tokens = facts["parameters"]["alpha"], facts["parameters"]["acc_T"]
    cap = int(facts["parameters"]["acc_cap_ratio"] * tokens)
    for best, name in ((ThresholdBest.FIRST_HEAD, "acc_fetch_num"), (ThresholdBest.OWN, "acc_fetch_num_own_max")):
        for row in range(tokens):
            scores = arrays["acc_scores"][:, row, : row + 1]
            counts = threshold_counts(scores, _all(scores), margin, Comparison.AT_LEAST, best)
            kept = min(cap, equalise(counts.tolist(), CountRule.TRUNCATED_MEAN))
            assert kept == int(arrays[name][row])


def test_comparison_decides_about_the_bar_itself() -> None:
    scores = torch.tensor([[3.0, 1.0, 1.0, 0.5]])
    assert threshold_counts(scores, _all(scores), 2.0).tolist() == [3]
    assert threshold_counts(scores, _all(scores), 2.0, Comparison.ABOVE).tolist() == [1]
    assert threshold_counts(scores, _all(scores), 0.0, Comparison.ABOVE).tolist() == [0]


@pytest.mark.parametrize("comparison", Comparison)
def test_an_infinite_margin_passes_all_that_is_allowed(comparison: Comparison) -> None:
    scores = torch.tensor([[3.0, -1e30, 1.0], [0.0, 0.0, 0.0]])
    allowed = torch.tensor([[True, True, False], [True, True, True]])
    assert threshold_counts(scores, allowed, math.inf, comparison).tolist() == [2, 3]


def test_rows_that_are_not_allowed_set_the_bar_and_do_not_count() -> None:
    scores = torch.tensor([[9.0, 1.0, 0.0]])
    allowed = torch.tensor([[False, True, True]])
    assert threshold_counts(scores, allowed, 5.0).tolist() == [0]
    assert threshold_counts(scores, allowed, 8.0).tolist() == [1]


def test_first_heads_best_can_leave_others_without_a_row() -> None:
    scores = torch.tensor([[9.0, 8.0], [1.0, 0.0]])
    assert threshold_counts(scores, _all(scores), 1.0).tolist() == [2, 2]
    assert threshold_counts(scores, _all(scores), 1.0, best=ThresholdBest.FIRST_HEAD).tolist() == [2, 0]


@given(st.lists(st.integers(0, 100), min_size=1))
def test_equalised_count_lies_between_the_counts(counts: list[int]) -> None:
    up, down = equalise(counts, CountRule.MEAN), equalise(counts, CountRule.TRUNCATED_MEAN)
    assert min(counts) <= down <= up <= max(counts)
    assert up - down == (sum(counts) % len(counts) > 0)


def test_mass_counts_what_enters_anyway() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    allowed = torch.tensor([[False, True, True, True]])
    offered = allowed[0]
    counts = [int(mass_counts(scores, scores, allowed, offered, mass)) for mass in (0.3, 0.41, 0.71, 0.91, 1.0)]
    assert counts == [0, 1, 2, 3, 3]
    # A row that the pool hides neither counts nor enters.
    hidden = torch.tensor([[False, False, True, True]])
    assert int(mass_counts(scores, scores, hidden, offered, 0.59)) == 1
    assert int(mass_counts(scores, scores, hidden, offered, 0.99)) == 2


def test_mass_of_a_group_is_the_mean_of_its_heads() -> None:
    scores = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1]]).log()
    shared = torch.tensor([[1.0, 0.5, 0.0]])
    every = torch.ones(1, 3, dtype=torch.bool)
    counts = [int(mass_counts(scores, shared, every, every[0], mass)) for mass in (0.49, 0.51, 0.89, 0.91)]
    assert counts == [1, 2, 2, 3]
