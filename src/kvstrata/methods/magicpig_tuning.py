"""How many bits and tables make MagicPIG sample so many rows on average."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.magicpig import COLLISIONS, MagicPIG
from kvstrata.methods.simhash import MAX_BITS, cosines, inclusion_probability

__all__ = ["Tuning", "expected_rows", "tuned_to"]

_ANGLES = 1 << 14


@dataclass(frozen=True)
class Tuning:
    """method: with bits and tables set. rows: that it samples on average for a query head and query."""

    method: MagicPIG
    rows: float


def expected_rows(method: MagicPIG, samples: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Rows that a query head samples for a query: the mean over planes, and over all queries of `samples`.

    samples: of any layers, keys [kv_heads, n, head_dim] of the rows that may be sampled, the persistent ones left out,
    and queries [query_heads, m, head_dim]. The sum of the inclusion probabilities, before any budget cuts the sample.
    """
    return _expected(_angles(samples), method.bits, method.tables)


def tuned_to(method: MagicPIG, samples: Iterable[tuple[Tensor, Tensor]], rows: float, most_tables: int = 150) -> Tuning:
    """`method` with bits and tables for which `expected_rows` on `samples` comes closest to `rows`.

    rows: beside the persistent ones; for a budget in force, what it leaves beside these. The same mean is reached by
    few tables of few bits and by many of many; more bits tell near from far keys more sharply, and every table costs
    memory, so that the most bits are taken for which `most_tables` suffice. Every bit and table counts for all layers:
    one layer may sample more than another, and a single query far more than the mean.

    Errors: `ConfigurationError` when even tables of one bit sample fewer rows.
    """
    angles = _angles(samples)
    if not rows > 0 or most_tables < COLLISIONS:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"rows={rows!r} must be above 0 and most_tables={most_tables!r} at least {COLLISIONS}",
        )
    enough = [bits for bits in range(1, MAX_BITS + 1) if _expected(angles, bits, most_tables) >= rows]
    if not enough:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"{most_tables} tables sample {_expected(angles, 1, most_tables):.1f} rows on average, not {rows}",
            "ask for fewer rows than there are, or allow more tables",
        )
    bits = enough[-1]
    low, high = COLLISIONS, most_tables
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _expected(angles, bits, middle) >= rows else (middle + 1, high)
    near = [tables for tables in (low - 1, low) if tables >= COLLISIONS]
    tables = min(near, key=lambda count: abs(_expected(angles, bits, count) - rows))
    return Tuning(replace(method, bits=bits, tables=tables), _expected(angles, bits, tables))


def _angles(samples: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Keys per query at every angle between 0 and pi, float64 [_ANGLES]."""
    counts, queries_seen = torch.zeros(_ANGLES, dtype=torch.float64), 0
    for keys, queries in samples:
        kv_heads, _, dim = keys.shape
        centred = keys.float() - keys.float().mean(1, keepdim=True)
        for query in queries.reshape(kv_heads, -1, dim).split(16, dim=1):
            angle = torch.arccos(cosines(query, centred)) / math.pi
            place = (angle * _ANGLES).long().clamp(0, _ANGLES - 1).flatten()
            counts += torch.bincount(place, minlength=_ANGLES).double().cpu()
        queries_seen += queries.shape[0] * queries.shape[1]
    if not queries_seen:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, "samples holds no query")
    return counts / queries_seen


def _expected(angles: Tensor, bits: int, tables: int) -> float:
    middles = torch.cos((torch.arange(_ANGLES, dtype=torch.float64) + 0.5) * (math.pi / _ANGLES))
    return float((angles * inclusion_probability(middles, bits, tables)).sum())
