"""Dense attention of one query head over the legal rows, in float64, and what a dense run wrote down about it.

    p_i = exp(s_i) / sum_j exp(s_j),  s_i = scale * q.k_i,  o = sum_i p_i v_i

For recorded rows and small cases: NumPy, no batch. `kvstrata.placement.shadow` measures live steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstrata.errors import ConfigurationError, Reason, RetrievalError

__all__ = ["ANSWER", "DenseAnswer", "HeadReference", "require_normalised"]

_SLACK = 1e-6
_AGAIN = "compute the dense reference again from the rows as they are stored"


@dataclass(frozen=True, eq=False)
class HeadReference:
    """query [head_dim], keys and values [visible, head_dim], as arrays or what becomes one. scale: multiplies scores.

    Attributes beside these: probabilities [visible] and output [head_dim], float64.

    Errors: `RetrievalError` with GEOMETRY_MISMATCH or TENSOR_NOT_FINITE, naming the tensor; `ConfigurationError` for a
    scale that is not finite and positive, or no rows.
    """

    query: NDArray[np.float64]
    keys: NDArray[np.float64]
    values: NDArray[np.float64]
    scale: float
    visible: int
    head_dim: int
    probabilities: NDArray[np.float64] = field(init=False)
    output: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        if not (np.isfinite(self.scale) and self.scale > 0) or self.visible < 1 or self.head_dim < 1:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"HeadReference takes a positive scale, rows and elements, got {self.scale}, {self.visible} and "
                f"{self.head_dim}",
            )
        rows = (self.visible, self.head_dim)
        for name, shape in (("query", rows[1:]), ("keys", rows), ("values", rows)):
            object.__setattr__(self, name, _tensor(f"reference.{name}", getattr(self, name), shape))
        scores = self.keys @ self.query * self.scale
        weights = np.exp(scores - scores.max())
        object.__setattr__(self, "probabilities", weights / weights.sum())
        object.__setattr__(self, "output", self.probabilities @ self.values)

    @classmethod
    def of(cls, query: ArrayLike, keys: ArrayLike, values: ArrayLike, scale: float) -> HeadReference:
        """The reference of tensors whose shapes are taken from `keys`."""
        rows = np.asarray(keys, np.float64)
        visible, head_dim = rows.shape if rows.ndim == 2 else (1, 1)
        return cls(np.asarray(query, np.float64), rows, np.asarray(values, np.float64), scale, visible, head_dim)

    @property
    def value_bound(self) -> float:
        """V_max: the length of the longest value."""
        return float(np.linalg.norm(self.values, axis=-1).max())

    def top_rows(self, count: int) -> tuple[int, ...]:
        """Positions of the `count` rows of the highest weight, in order of position; the lower one in a tie."""
        return tuple(sorted(int(row) for row in np.argsort(-self.probabilities, kind="stable")[:count]))


@dataclass(frozen=True, slots=True)
class DenseAnswer:
    """What a dense run wrote down: probabilities of all rows, the positions of the top ones, and a bound on values.

    Records are taken from files; `require` holds one against the rows before anything is measured with it.
    """

    probabilities: tuple[float, ...]
    top_rows: tuple[int, ...]
    value_bound: float

    @classmethod
    def of(cls, reference: HeadReference, top: int) -> DenseAnswer:
        """What `reference` says, with its `top` best rows."""
        return cls(tuple(map(float, reference.probabilities)), reference.top_rows(top), reference.value_bound)

    def require(self, reference: HeadReference) -> DenseAnswer:
        """This record. Errors: `RetrievalError` of the first check in `ANSWER` that fails."""
        for check in ANSWER:
            check(self, reference)
        return self


def normalised(answer: DenseAnswer, reference: HeadReference) -> None:
    """The probabilities are one distribution."""
    require_normalised(answer.probabilities)


def top_rows(answer: DenseAnswer, reference: HeadReference) -> None:
    """The top rows are those of the highest dense weight."""
    wanted = reference.top_rows(len(answer.top_rows))
    if tuple(sorted(answer.top_rows)) != wanted:
        cause = f"{list(answer.top_rows)} were presented, {list(wanted)} have the highest weights"
        raise _refused(Reason.TOP_ROWS_MISMATCH, "answer.top_rows", cause)


def value_bound(answer: DenseAnswer, reference: HeadReference) -> None:
    """No value is longer than the bound says."""
    if not answer.value_bound >= reference.value_bound * (1 - _SLACK):
        cause = f"{answer.value_bound:g} is less than the length {reference.value_bound:g} of a value"
        raise _refused(Reason.VALUE_BOUND_INVALID, "answer.value_bound", cause)


ANSWER: tuple[Callable[[DenseAnswer, HeadReference], None], ...] = (normalised, top_rows, value_bound)


def require_normalised(probabilities: ArrayLike) -> NDArray[np.float64]:
    """As an array [rows]. Errors: `RetrievalError` unless they are not negative and sum to 1, to one in a million."""
    p = np.asarray(probabilities, np.float64)
    if p.ndim != 1 or not bool((p >= 0).all()) or not abs(float(p.sum()) - 1) <= _SLACK:
        cause = f"dense weights sum to {float(p.sum()):.6g}"
        raise _refused(Reason.PROBABILITIES_NOT_NORMALISED, "answer.probabilities", cause)
    return p


def _tensor(name: str, value: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    array = np.asarray(value, np.float64)
    if array.shape != shape:
        raise _refused(Reason.GEOMETRY_MISMATCH, name, f"shape {array.shape} was presented, {shape} is declared")
    if not bool(np.isfinite(array).all()):
        raise _refused(Reason.TENSOR_NOT_FINITE, name, "it holds infinity or NaN")
    return array


def _refused(reason: Reason, field: str, cause: str) -> RetrievalError:
    return RetrievalError(reason, f"{field}: {cause}", _AGAIN, field=field)
