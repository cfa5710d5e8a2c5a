"""Omitted mass controls the error as derived; recall does not; namespaces are not mixed."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.method import Unit
from kvstrata.cost.dense_reference import HeadReference
from kvstrata.cost.support_error import (
    SUPPORT_ERROR,
    Members,
    conditional_outputs,
    margin_omitted_bound,
    masses,
    measure_support,
    recall,
)
from kvstrata.errors import ConfigurationError, Reason, RetrievalError

module: Any = import_module("kvstrata.cost.support_error")
LOGS = [[math.log(1)], [math.log(2)], [math.log(5)]]
REFERENCE = HeadReference.of([1.0], LOGS, [[8.0], [4.0], [0.0]], 1.0)
CASES = st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**32 - 1), st.floats(0, 1))


def _case(shape: tuple[int, int, int, float]) -> tuple[HeadReference, list[int]]:
    rows, dim, seed, share = shape
    rng = np.random.default_rng(seed)
    query, keys, values = rng.normal(size=dim), rng.normal(size=(rows, dim)) * 2, rng.normal(size=(rows, dim)) * 3
    kept = [row for row in range(rows) if rng.random() < share]
    return HeadReference.of(query, keys, values, 0.7), kept


def test_worked_example() -> None:
    """Weights 1/8, 2/8, 5/8 of values 8, 4, 0: o = 2. Without the last row o_R = 16/3."""
    found = measure_support(REFERENCE, [0, 1])
    assert (found.rows, found.retained, found.omitted) == ((0, 1), pytest.approx(3 / 8), pytest.approx(5 / 8))
    assert found.error == pytest.approx(16 / 3 - 2)
    assert (found.dense_norm, found.relative) == (pytest.approx(2.0), pytest.approx(5 / 3))
    assert found.bound == pytest.approx(2 * 5 / 8 * 8)


@given(CASES)
def test_the_mixture_of_both_parts_is_the_dense_output(shape: tuple[int, int, int, float]) -> None:
    reference, rows = _case(shape)
    retained, omitted = masses(reference.probabilities, rows)
    kept, left = conditional_outputs(reference, rows)
    np.testing.assert_allclose(retained * kept + omitted * left, reference.output, atol=1e-10)
    if rows:
        np.testing.assert_allclose(kept - reference.output, omitted * (kept - left), atol=1e-10)


@given(CASES)
def test_the_bound_holds(shape: tuple[int, int, int, float]) -> None:
    reference, rows = _case(shape)
    found = measure_support(reference, rows) if rows else measure_support(reference, [0])
    assert found.error <= found.bound + 1e-9
    assert found.retained + found.omitted == pytest.approx(1)


@given(CASES)
def test_all_rows_leave_nothing(shape: tuple[int, int, int, float]) -> None:
    reference, _ = _case(shape)
    found = measure_support(reference, range(reference.visible))
    assert found.omitted == 0.0
    assert found.error <= 1e-12


def test_duplicates_count_once() -> None:
    assert measure_support(REFERENCE, [0, 1, 1]) == measure_support(REFERENCE, [0, 1])


def test_a_dense_output_of_zero_has_no_relative_error() -> None:
    reference = HeadReference.of([1.0], [[0.0], [0.0]], [[1.0], [-1.0]], 1.0)
    found = measure_support(reference, [0])
    assert (found.dense_norm, found.relative, found.error) == (None, None, pytest.approx(1.0))


def test_an_output_of_other_rows_breaks_the_bound() -> None:
    with pytest.raises(RetrievalError) as caught:
        measure_support(REFERENCE, [2, 1], output=[16 / 3])
    assert caught.value.reason is Reason.ERROR_BOUND_VIOLATED


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_that_are_not_there(row: int) -> None:
    with pytest.raises(ConfigurationError, match="are none of 3"):
        masses(REFERENCE.probabilities, [0, row])


def test_masses_take_one_distribution() -> None:
    with pytest.raises(RetrievalError, match="probabilities_not_normalised"):
        masses([0.5, 0.48], [0])


WRONG: dict[str, tuple[dict[str, Any], Reason]] = {
    "mass_ledger": ({"retained": 0.5}, Reason.MASS_LEDGER_MISMATCH),
    "local_bound": ({"error": 11.0, "relative": None}, Reason.ERROR_BOUND_VIOLATED),
    "denominator": ({"dense_norm": None}, Reason.RELATIVE_ERROR_UNCONDITIONED),
}


@pytest.mark.parametrize("check", WRONG)
def test_each_check_refuses_and_is_needed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reason = WRONG[check]
    found = measure_support(REFERENCE, [0, 1])
    with pytest.raises(RetrievalError) as caught:
        replace(found, **changes)
    assert caught.value.reason is reason
    monkeypatch.setattr(module, "SUPPORT_ERROR", tuple(one for one in SUPPORT_ERROR if one.__name__ != check))
    replace(found, **changes)


def test_the_table_has_every_check() -> None:
    assert list(WRONG) == [check.__name__ for check in SUPPORT_ERROR]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"retained": -0.1, "omitted": 1.1}, Reason.MASS_LEDGER_MISMATCH),
        ({"retained": math.nan}, Reason.MASS_LEDGER_MISMATCH),
        ({"error": math.nan, "relative": None}, Reason.ERROR_BOUND_VIOLATED),
        ({"relative": 0.1}, Reason.RELATIVE_ERROR_UNCONDITIONED),
        ({"dense_norm": 0.0}, Reason.RELATIVE_ERROR_UNCONDITIONED),
    ],
)
def test_records_that_contradict_themselves(changes: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(RetrievalError) as caught:
        replace(measure_support(REFERENCE, [0, 1]), **changes)
    assert caught.value.reason is reason


def test_recall_of_rows() -> None:
    top = Members(Unit.ROW, (2, 3, 6))
    assert recall(Members(Unit.ROW, (2, 6, 5, 2)), top) == pytest.approx(2 / 3)
    assert recall(Members(Unit.ROW, ()), Members(Unit.ROW, ())) == 1.0
    assert recall(Members(Unit.PAGE, (1,)), Members(Unit.PAGE, (1, 2))) == 0.5


@pytest.mark.parametrize("unit", [unit for unit in Unit if unit is not Unit.ROW])
def test_units_are_not_compared_with_rows(unit: Unit) -> None:
    for pair in [(unit, Unit.ROW), (Unit.ROW, unit)]:
        with pytest.raises(RetrievalError) as caught:
            recall(Members(pair[0], (1,)), Members(pair[1], (1,)))
        assert caught.value.reason is Reason.RECALL_NAMESPACE_MISMATCH


@given(st.floats(0, 20), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_rows_below_a_margin_hold_at_most_the_bound(margin: float, omitted: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.concatenate([[0.0], -margin - rng.exponential(size=omitted)])
    weights = np.exp(scores) / np.exp(scores).sum()
    assert weights[1:].sum() <= margin_omitted_bound(margin, omitted) + 1e-12


def test_many_rows_far_below_the_best_still_hold_most_of_it() -> None:
    assert margin_omitted_bound(5.0, 1) == pytest.approx(math.exp(-5) / (1 + math.exp(-5)))
    assert margin_omitted_bound(5.0, 1000) == pytest.approx(0.8708, abs=5e-5)
    with pytest.raises(ConfigurationError, match="margin"):
        margin_omitted_bound(-1.0, 1)
