"""The dense answer of one head, and what a record of it must agree with."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from kvstrata.cost.dense_reference import ANSWER, DenseAnswer, HeadReference
from kvstrata.errors import ConfigurationError, Reason, RetrievalError

module: Any = import_module("kvstrata.cost.dense_reference")
REFERENCE = HeadReference.of([1.0, 0.0], [[math.log(1), 0], [math.log(2), 5], [math.log(5), 0]], np.eye(3)[:, :2], 1.0)
RECORD = DenseAnswer.of(REFERENCE, 2)


def test_worked_probabilities() -> None:
    assert REFERENCE.probabilities == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    assert REFERENCE.output == pytest.approx([1 / 8, 2 / 8])
    assert REFERENCE.top_rows(2) == (1, 2)
    assert REFERENCE.value_bound == 1.0


def test_large_scores_do_not_overflow() -> None:
    reference = HeadReference.of([1e6], [[1.0], [2.0]], [[1.0], [3.0]], 1.0)
    assert reference.output == pytest.approx([3.0])


def test_ties_go_to_the_lower_row() -> None:
    assert HeadReference.of([0.0], [[1.0]] * 4, [[1.0]] * 4, 1.0).top_rows(2) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"keys": REFERENCE.keys[:2]}, Reason.GEOMETRY_MISMATCH, "keys"),
        ({"values": np.zeros((3, 3))}, Reason.GEOMETRY_MISMATCH, "values"),
        ({"query": np.zeros(3)}, Reason.GEOMETRY_MISMATCH, "query"),
        ({"query": np.array([math.nan, 0.0])}, Reason.TENSOR_NOT_FINITE, "query"),
        ({"values": np.full((3, 2), math.inf)}, Reason.TENSOR_NOT_FINITE, "values"),
    ],
)
def test_tensors_that_do_not_fit(changes: dict[str, Any], reason: Reason, field: str) -> None:
    with pytest.raises(RetrievalError) as caught:
        replace(REFERENCE, **changes)
    assert (caught.value.reason, caught.value.field) == (reason, f"reference.{field}")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_is_positive(scale: float) -> None:
    with pytest.raises(ConfigurationError, match="positive scale"):
        replace(REFERENCE, scale=scale)


def test_no_rows_are_no_reference() -> None:
    with pytest.raises(ConfigurationError, match="takes a positive scale, rows and elements"):
        HeadReference.of([1.0], np.zeros((0, 1)), np.zeros((0, 1)), 1.0)


WRONG: dict[str, tuple[dict[str, Any], Reason]] = {
    "normalised": ({"probabilities": (0.1, 0.2, 0.6)}, Reason.PROBABILITIES_NOT_NORMALISED),
    "top_rows": ({"top_rows": (0, 2)}, Reason.TOP_ROWS_MISMATCH),
    "value_bound": ({"value_bound": 0.9}, Reason.VALUE_BOUND_INVALID),
}


@pytest.mark.parametrize("check", WRONG)
def test_each_check_refuses_and_is_needed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reason = WRONG[check]
    assert RECORD.require(REFERENCE) is RECORD
    with pytest.raises(RetrievalError) as caught:
        replace(RECORD, **changes).require(REFERENCE)
    assert caught.value.reason is reason
    monkeypatch.setattr(module, "ANSWER", tuple(one for one in ANSWER if one.__name__ != check))
    replace(RECORD, **changes).require(REFERENCE)


def test_the_table_has_every_check() -> None:
    assert list(WRONG) == [check.__name__ for check in ANSWER]


@pytest.mark.parametrize("weights", [(-0.1, 0.5, 0.6), (math.nan, 0.5, 0.5), (0.5, 0.5 + 3e-6)])
def test_weights_are_one_distribution(weights: tuple[float, ...]) -> None:
    with pytest.raises(RetrievalError, match="probabilities_not_normalised"):
        replace(RECORD, probabilities=weights).require(REFERENCE)


def test_a_looser_bound_on_values_is_a_bound() -> None:
    assert replace(RECORD, value_bound=2.0).require(REFERENCE).value_bound == 2.0
