"""The bound of a linear map, and maps whose declared norm is not theirs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cost.downstream import DownstreamMap, MapNorm, matrix_norm
from kvstrata.errors import Reason, RetrievalError

MATRIX = [[1.2, -0.3], [0.4, 0.9]]


def test_both_norms_of_a_worked_matrix() -> None:
    """A^T A is diagonal here: 1.6 and 0.9."""
    assert matrix_norm(MATRIX, MapNorm.FROBENIUS) == pytest.approx(math.sqrt(2.5))
    assert matrix_norm(MATRIX, MapNorm.SPECTRAL) == pytest.approx(math.sqrt(1.6))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_bounds_hold_in_their_order(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, error = rng.normal(size=(rows, columns)), rng.normal(size=columns)
    frobenius = DownstreamMap.of(matrix).apply(error)
    spectral = DownstreamMap.of(matrix, MapNorm.SPECTRAL).apply(error)
    assert frobenius.error == spectral.error == pytest.approx(float(np.linalg.norm(matrix @ error)))
    assert spectral.error <= spectral.bound + 1e-9 <= frobenius.bound + 2e-9


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"norm": 1.4}, Reason.DOWNSTREAM_BOUND_INVALID, "norm"),
        ({"norm": math.nan}, Reason.DOWNSTREAM_BOUND_INVALID, "norm"),
        ({"norm": 1.2, "kind": MapNorm.SPECTRAL}, Reason.DOWNSTREAM_BOUND_INVALID, "norm"),
        ({"matrix": ((1.0, 2.0), (1.0,))}, Reason.GEOMETRY_MISMATCH, "matrix"),
        ({"matrix": ((), ())}, Reason.GEOMETRY_MISMATCH, "matrix"),
        ({"matrix": ((math.inf, 1.0),)}, Reason.TENSOR_NOT_FINITE, "matrix"),
    ],
)
def test_maps_that_are_none(changes: dict[str, Any], reason: Reason, field: str) -> None:
    with pytest.raises(RetrievalError) as caught:
        replace(DownstreamMap.of(MATRIX), **changes)
    assert (caught.value.reason, caught.value.field) == (reason, f"downstream.{field}")


def test_a_spectral_norm_may_be_below_the_frobenius_norm() -> None:
    assert replace(DownstreamMap.of(MATRIX), norm=1.4, kind=MapNorm.SPECTRAL).norm == 1.4


def test_an_error_of_another_length() -> None:
    with pytest.raises(RetrievalError) as caught:
        DownstreamMap.of(MATRIX).apply([1.0, 2.0, 3.0])
    assert caught.value.reason is Reason.GEOMETRY_MISMATCH
