"""What a finite support costs: omitted mass, the error that it controls, and recall, which controls nothing.

With R the rows that entered, O those left out and delta their mass, o_R and o_O the averages over either part,

    o = (1 - delta) o_R + delta o_O,   o_R - o = delta (o_R - o_O)
    |o_R - o| <= delta (|o_R| + |o_O|) <= 2 delta V_max

since both averages are convex combinations of values no longer than V_max. The bound is local and can be loose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstrata.contract.method import Unit
from kvstrata.cost.bounds import require_finite
from kvstrata.cost.dense_reference import HeadReference, require_normalised
from kvstrata.errors import ConfigurationError, Reason, RetrievalError

__all__ = [
    "SUPPORT_ERROR",
    "Members",
    "SupportError",
    "conditional_outputs",
    "margin_omitted_bound",
    "masses",
    "measure_support",
    "recall",
]

_SLACK = 1e-5
_AGAIN = "measure the support again against the dense reference"


@dataclass(frozen=True, slots=True)
class SupportError:
    """One head's support against dense attention.

    retained, omitted: dense weight of the rows that entered and of the others. error: |o_R - o|. value_bound: V_max.
    dense_norm: |o|; relative: error / |o|. Either both or none: a relative error says nothing without its denominator,
    and there is none where the dense output is zero.

    Errors: `RetrievalError` of the first check in `SUPPORT_ERROR` that fails.
    """

    rows: tuple[int, ...]
    retained: float
    omitted: float
    error: float
    value_bound: float
    dense_norm: float | None = None
    relative: float | None = None

    def __post_init__(self) -> None:
        for check in SUPPORT_ERROR:
            check(self)

    @property
    def bound(self) -> float:
        """2 delta V_max."""
        return 2 * self.omitted * self.value_bound


def mass_ledger(record: SupportError) -> None:
    """Both masses are shares of one."""
    if not (record.retained >= 0 and record.omitted >= 0 and abs(record.retained + record.omitted - 1) <= _SLACK):
        cause = f"{record.retained:.6g} retained and {record.omitted:.6g} omitted do not make 1"
        raise _refused(Reason.MASS_LEDGER_MISMATCH, "error.retained", cause)


def local_bound(record: SupportError) -> None:
    """The error is within the bound, but for rounding."""
    if not record.error <= record.bound + _SLACK * max(1.0, record.value_bound):
        cause = f"{record.error:.6g} is more than 2 * {record.omitted:.6g} * {record.value_bound:.6g}"
        raise _refused(Reason.ERROR_BOUND_VIOLATED, "error.error", cause)


def denominator(record: SupportError) -> None:
    """A relative error comes with the norm that it divides by."""
    norm, relative = record.dense_norm, record.relative
    if relative is not None and not (norm and math.isclose(relative * norm, record.error, rel_tol=_SLACK)):
        cause = f"{relative:.6g} was given for a dense norm of {norm} and an error of {record.error:.6g}"
        raise _refused(Reason.RELATIVE_ERROR_UNCONDITIONED, "error.relative", cause)


SUPPORT_ERROR: tuple[Callable[[SupportError], None], ...] = (mass_ledger, local_bound, denominator)


@dataclass(frozen=True, slots=True)
class Members:
    """Identifiers and the namespace that they count in."""

    unit: Unit
    ids: tuple[int, ...]


def masses(probabilities: ArrayLike, rows: Collection[int]) -> tuple[float, float]:
    """(retained, omitted) dense weight, where `rows` entered; duplicates count once.

    Errors: `RetrievalError` with PROBABILITIES_NOT_NORMALISED; `ConfigurationError` for a row that is not there.
    """
    p = require_normalised(probabilities)
    inside = _mask(len(p), rows)
    return float(p[inside].sum()), float(p[~inside].sum())


def conditional_outputs(
    reference: HeadReference, rows: Collection[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(o_R, o_O), [head_dim] each: averages over the rows that entered and over the others; zeros for an empty part."""
    inside = _mask(reference.visible, rows)
    return _average(reference, inside), _average(reference, ~inside)


def measure_support(
    reference: HeadReference, rows: Collection[int], output: ArrayLike | None = None, value_bound: float | None = None
) -> SupportError:
    """Hold the rows that entered against dense attention.

    output: [head_dim] that the method gave; exact attention over `rows` unless given. value_bound: a V_max that was
    declared; the longest value's length unless given. Errors: `ConfigurationError` for a row that is not there;
    `RetrievalError` with ERROR_BOUND_VIOLATED for an output that is not the average over these rows.
    """
    retained, omitted = masses(reference.probabilities, rows)
    found = conditional_outputs(reference, rows)[0] if output is None else np.asarray(output, np.float64)
    error = float(np.linalg.norm(found - reference.output))
    norm = float(np.linalg.norm(reference.output))
    return SupportError(
        tuple(sorted(set(rows))),
        retained,
        omitted,
        error,
        reference.value_bound if value_bound is None else value_bound,
        norm if norm else None,
        error / norm if norm else None,
    )


def recall(found: Members, wanted: Members) -> float:
    """|found & wanted| / |wanted|; 1 where nothing is wanted.

    Errors: `RetrievalError` with RECALL_NAMESPACE_MISMATCH for identifiers of two namespaces: a page is no row.
    """
    if found.unit is not wanted.unit:
        raise _refused(
            Reason.RECALL_NAMESPACE_MISMATCH,
            "recall",
            f"{found.unit} identifiers were compared with {wanted.unit} identifiers",
        )
    top = set(wanted.ids)
    return len(top & set(found.ids)) / len(top) if top else 1.0


def margin_omitted_bound(margin: float, omitted_rows: int) -> float:
    """The most mass that `omitted_rows` can hold when each scores at least `margin` below the best row, which entered.

    Each weighs at most exp(-margin) of the best, so n of them hold at most n e / (1 + n e), e = exp(-margin): little
    for one row, and anything for many. Errors: `ConfigurationError` for a negative argument.
    """
    require_finite("margin", margin)
    require_finite("omitted_rows", omitted_rows)
    weight = omitted_rows * math.exp(-margin)
    return weight / (1 + weight)


def _mask(visible: int, rows: Collection[int]) -> NDArray[np.bool_]:
    outside = [row for row in rows if not 0 <= row < visible]
    if outside:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"rows {outside} are none of {visible}")
    inside = np.zeros(visible, np.bool_)
    inside[list(rows)] = True
    return inside


def _average(reference: HeadReference, inside: NDArray[np.bool_]) -> NDArray[np.float64]:
    weights = np.where(inside, reference.probabilities, 0.0)
    total = weights.sum()
    return np.zeros(reference.head_dim) if total == 0 else weights / total @ reference.values


def _refused(reason: Reason, field: str, cause: str) -> RetrievalError:
    return RetrievalError(reason, f"{field}: {cause}", _AGAIN, field=field)
