"""How far a local error can go through one linear map: algebra about that map, and no statement about a model.

|A e| <= |A|_2 |e| <= |A|_F |e|
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from kvstrata.errors import Reason, RetrievalError

__all__ = ["DownstreamMap", "MapNorm", "MappedError"]

_SLACK = 1e-6
_DECLARE = "declare a norm of that matrix"


class MapNorm(StrEnum):
    """Which norm bounds the map. FROBENIUS is never smaller than SPECTRAL, which is the least that holds."""

    FROBENIUS = "frobenius"
    SPECTRAL = "spectral"


@dataclass(frozen=True, slots=True)
class MappedError:
    """error: |A e|. bound: the declared norm times |e|."""

    error: float
    bound: float


@dataclass(frozen=True, slots=True)
class DownstreamMap:
    """A declared linear map. matrix: rows of A. norm: of `kind`, at least what the matrix has.

    Errors: `RetrievalError` with GEOMETRY_MISMATCH for rows of several lengths, TENSOR_NOT_FINITE, or
    DOWNSTREAM_BOUND_INVALID for a norm that is too small.
    """

    matrix: tuple[tuple[float, ...], ...]
    norm: float
    kind: MapNorm = MapNorm.FROBENIUS

    def __post_init__(self) -> None:
        if len({len(row) for row in self.matrix}) != 1 or not self.matrix[0]:
            raise _refused(Reason.GEOMETRY_MISMATCH, "downstream.matrix", "its rows are no matrix")
        if not bool(np.isfinite(self.matrix).all()):
            raise _refused(Reason.TENSOR_NOT_FINITE, "downstream.matrix", "it holds infinity or NaN")
        least = matrix_norm(self.matrix, self.kind)
        if not self.norm >= least * (1 - _SLACK):
            cause = f"{self.norm:.6g} is less than the {self.kind} norm {least:.6g}"
            raise _refused(Reason.DOWNSTREAM_BOUND_INVALID, "downstream.norm", cause)

    @classmethod
    def of(cls, matrix: ArrayLike, kind: MapNorm = MapNorm.FROBENIUS) -> DownstreamMap:
        """The map with its own norm."""
        rows = tuple(tuple(map(float, row)) for row in np.asarray(matrix, np.float64))
        return cls(rows, matrix_norm(rows, kind), kind)

    def apply(self, error: ArrayLike) -> MappedError:
        """What becomes of a local error e [head_dim]. Errors: `RetrievalError` with GEOMETRY_MISMATCH."""
        e = np.asarray(error, np.float64)
        if e.shape != (len(self.matrix[0]),):
            cause = f"a map of {len(self.matrix[0])} columns was applied to an error of shape {e.shape}"
            raise _refused(Reason.GEOMETRY_MISMATCH, "downstream.matrix", cause)
        mapped = float(np.linalg.norm(np.asarray(self.matrix) @ e))
        return MappedError(mapped, self.norm * float(np.linalg.norm(e)))


def matrix_norm(matrix: ArrayLike, kind: MapNorm) -> float:
    """The norm of a matrix."""
    return float(np.linalg.norm(np.asarray(matrix, np.float64), "fro" if kind is MapNorm.FROBENIUS else 2))


def _refused(reason: Reason, field: str, cause: str) -> RetrievalError:
    return RetrievalError(reason, f"{field}: {cause}", _DECLARE, field=field)
