"""Partial attention states (m, l, u) and their exact merge.

The softmax over a set of rows splits over any partition of it: with m the largest score, l = sum exp(s - m) and
u = sum exp(s - m) v, two parts are brought onto the larger maximum and added (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"; used blockwise by FlashAttention, Dao et al. 2022). In exact arithmetic the merge
is associative and commutative; in fp32 it is so to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PartialState"]


@dataclass(frozen=True, eq=False)
class PartialState:
    """Attention of some query rows over part of the history. All tensors fp32, leading shape [...] shared.

    Attributes:
        m: [...], largest score; -inf for no rows.
        l: [...], sum of exp(score - m).
        u: [..., head_dim], sum of exp(score - m) * value.
    """

    m: Tensor
    l: Tensor  # noqa: E741 (the literature's name)
    u: Tensor

    @classmethod
    def empty(cls, *leading: int, head_dim: int, device: torch.device | str = "cpu") -> PartialState:
        """The state of no rows: the neutral element of `merge`."""
        return cls(
            torch.full(leading, -torch.inf, device=device),
            torch.zeros(leading, device=device),
            torch.zeros(*leading, head_dim, device=device),
        )

    @classmethod
    def of_rows(cls, query: Tensor, key: Tensor, value: Tensor, scale: float) -> PartialState:
        """The state of `query` [..., q, d] over `key` and `value` [..., n, d], computed in fp32."""
        scores = query.float() @ key.float().transpose(-1, -2) * scale
        if scores.shape[-1] == 0:
            return cls.empty(*scores.shape[:-1], head_dim=query.shape[-1], device=query.device)
        m = scores.amax(dim=-1)
        weights = torch.exp(scores - _finite(m).unsqueeze(-1))
        return cls(m, weights.sum(dim=-1), weights @ value.float())

    def merge(self, other: PartialState) -> PartialState:
        """The state over the rows of both, which must not overlap."""
        m = torch.maximum(self.m, other.m)
        ours, theirs = torch.exp(self.m - _finite(m)), torch.exp(other.m - _finite(m))
        return PartialState(
            m,
            self.l * ours + other.l * theirs,
            self.u * ours.unsqueeze(-1) + other.u * theirs.unsqueeze(-1),
        )

    def with_sinks(self, sinks: Tensor) -> PartialState:
        """The state with one more row, of score `sinks` [...] and a value of zero.

        This is how an attention sink enters the softmax (Xiao et al. 2023, "Efficient streaming language models with
        attention sinks", section 3.3, as a learned score for each head): it takes weight and gives nothing.
        """
        return self.merge(PartialState(sinks, torch.ones_like(self.l), torch.zeros_like(self.u)))

    def output(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalised attention output [..., head_dim]; zero where there were no rows."""
        normaliser = self.l.unsqueeze(-1)
        return torch.where(normaliser == 0, 0.0, self.u / normaliser).to(dtype)


def _finite(m: Tensor) -> Tensor:
    # exp(-inf - (-inf)) would be NaN; against a base of 0 it is the zero weight that is meant.
    return m.masked_fill(m == -torch.inf, 0.0)
