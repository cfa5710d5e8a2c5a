"""A basis of the key space in which few channels say most about the scores.

Lee et al. 2024, "InfiniGen: Efficient generative inference of large language models with dynamic KV cache management",
section 4. With an orthogonal A, (q A)(k A)^T = q k^T: turning queries and keys changes no score. A holds the right
singular vectors of sample queries, so that the first turned channels carry most of the queries' energy. Scores over a
part D of the channels are off by q_R k_R^T, where R is the rest, and by at most |q_R| |k_R|.

The paper multiplies A into the projection weights once (`fold`). That needs a model that adds positions before the
projections: rotary positions turn queries and keys after them, by a matrix that does not commute with A, so with rotary
positions A is multiplied to what comes out of the rotation instead (`skew`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from kvstrata.methods.choosing import top_units
from kvstrata.methods.selection import NO_UNIT

__all__ = ["ColumnRule", "PartialBasis", "QuerySample", "column_energy", "fold", "shared_columns", "skew", "skew_basis"]


class ColumnRule(StrEnum):
    """Which turned channels are kept, the same for queries and keys of a K/V head.

    SUM: the largest sums of |q| + |k| over the sampled rows, as in the paper. QUERIES: of |q| alone, as in the authors'
    offloading code. UNION: the largest of |q| and the largest of |k|, together up to twice as many, as in their
    accuracy scripts.
    """

    SUM = "sum"
    QUERIES = "queries"
    UNION = "union"


@dataclass(frozen=True, eq=False)
class PartialBasis:
    """columns: int64 [kv_heads, r], kept channels, ascending, filled up with `NO_UNIT`. projector: fp32 [kv_heads,
    head_dim, r], those columns of A; zeros where there is none."""

    columns: Tensor
    projector: Tensor

    @classmethod
    def of(cls, basis: Tensor, columns: Tensor) -> PartialBasis:
        """The `columns` of `basis` [kv_heads, head_dim, head_dim]."""
        chosen = columns.clamp_min(0).unsqueeze(1).expand(-1, basis.shape[1], -1)
        return cls(columns, basis.gather(-1, chosen).masked_fill((columns == NO_UNIT).unsqueeze(1), 0.0))


class QuerySample:
    """Queries at evenly spaced positions of a prefill, at most `most` of them.

    Kept are the multiples of the smallest power of two that leaves few enough, so that the same rows remain however the
    prefill was cut into steps. Rows that come again replace those at and after their first position.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.stride = 1
        self._rows: list[tuple[Tensor, Tensor]] = []

    def add(self, start: int, queries: Tensor) -> None:
        """Take in copies of `queries` [query_heads, rows, head_dim] from position `start` on; later rows are gone."""
        self._drop_from(start)
        positions = torch.arange(start, start + queries.shape[1], device=queries.device)
        self._rows.append(self._thinned(positions, queries))
        while sum(len(positions) for positions, _ in self._rows) > self.most:
            self.stride *= 2
            self._rows = [self._thinned(*piece) for piece in self._rows]

    @property
    def positions(self) -> Tensor:
        """int64 [rows]."""
        return torch.cat([positions for positions, _ in self._rows])

    @property
    def queries(self) -> Tensor:
        """[query_heads, rows, head_dim]."""
        return torch.cat([queries for _, queries in self._rows], dim=1)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept queries."""
        return sum(queries.numel() * queries.element_size() for _, queries in self._rows)

    def _drop_from(self, start: int) -> None:
        kept = [(positions, queries, positions < start) for positions, queries in self._rows]
        self._rows = [(positions[stays], queries[:, stays]) for positions, queries, stays in kept if bool(stays.any())]
        if not self._rows:
            self.stride = 1

    def _thinned(self, positions: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        kept = positions % self.stride == 0
        return positions[kept], queries[:, kept]


def skew_basis(states: Tensor, kv_heads: int) -> Tensor:
    """A, fp32 [kv_heads, head_dim, head_dim], orthogonal: right singular vectors of `states` [heads, rows, head_dim].

    The heads of a K/V head are stacked. Columns come in falling order of energy; of each the largest entry is positive.
    Computed in fp64 from the Gram matrix, whose eigenvectors they are, so that few rows make a complete basis too.
    """
    stacked = states.double().reshape(kv_heads, -1, states.shape[-1])
    vectors: Tensor = torch.linalg.eigh(stacked.mT @ stacked).eigenvectors.flip(-1)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return (vectors * torch.where(largest < 0, -1.0, 1.0)).float()


def skew(states: Tensor, basis: Tensor) -> Tensor:
    """`states` [heads, rows, head_dim] times `basis` [kv_heads, head_dim, r] of their K/V head: fp32 [heads, rows, r].

    With rotary positions `states` come after the rotation.
    """
    grouped: Tensor = states.float().reshape(basis.shape[0], -1, states.shape[-1]) @ basis
    return grouped.reshape(states.shape[0], states.shape[1], basis.shape[-1])


def fold(weight: Tensor, bias: Tensor | None, basis: Tensor) -> tuple[Tensor, Tensor | None]:
    """A projection that gives turned channels at once: `weight` [heads, head_dim, hidden_size], `bias` [heads,
    head_dim], `basis` [kv_heads, head_dim, head_dim]; the results are fp32.

    Only for queries and keys that nothing turns or norms after the projection: not for rotary positions.
    """
    turned = basis.repeat_interleave(weight.shape[0] // basis.shape[0], dim=0).mT
    return turned @ weight.float(), None if bias is None else (turned @ bias.float().unsqueeze(-1)).squeeze(-1)


def column_energy(skewed: Tensor, kv_heads: int) -> Tensor:
    """Sums of absolute values over the rows of `skewed` [heads, rows, head_dim], as [kv_heads, head_dim].

    Of the heads of a K/V head the mean, so that its queries do not outweigh its keys by their number.
    """
    summed: Tensor = skewed.abs().sum(1).reshape(kv_heads, -1, skewed.shape[-1])
    return summed.mean(1)


def shared_columns(queries: Tensor, keys: Tensor, count: int, rule: ColumnRule) -> Tensor:
    """`PartialBasis.columns` for the energies of `queries` and `keys` [kv_heads, head_dim]: `count` channels, or up to
    twice as many for UNION. Of channels with equal energy the lower ones are kept."""
    kept = torch.zeros_like(queries, dtype=torch.bool)
    for energy in {
        ColumnRule.SUM: (queries + keys,),
        ColumnRule.QUERIES: (queries,),
        ColumnRule.UNION: (queries, keys),
    }[rule]:
        kept.scatter_(1, top_units(energy, count), True)
    dim = kept.shape[1]
    columns = torch.arange(dim, device=kept.device).expand_as(kept).masked_fill(~kept, dim).sort(-1).values
    columns = columns[:, : int(kept.sum(-1).max())]
    return columns.masked_fill(columns == dim, NO_UNIT)
