"""Families with one matrix each for queries, keys and values."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from kvstrata.engines.transformers.families.base import Family
from kvstrata.engines.transformers.families.weights import plain_projection
from kvstrata.ports import ProjectionWeights

__all__ = ["SeparateProjections"]


class SeparateProjections(Family):
    """`q_proj`, `k_proj`, `v_proj`, and norms over queries and keys if the family has them."""

    norms: ClassVar[Literal["none", "head", "projection"]] = "none"
    """Over nothing, over each head's elements, or over all elements of a projection."""

    def project(self, attention: Any, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key = attention.q_proj(normed), attention.k_proj(normed)
        if self.norms != "none":
            query, key = self._norm(attention.q_norm, query), self._norm(attention.k_norm, key)
        return self._heads(query), self._heads(key), self._heads(attention.v_proj(normed))

    def projection_weights(self, attention: Any) -> ProjectionWeights:
        sides = ((attention.q_proj, self.query_heads), (attention.k_proj, self.kv_heads))
        query, key, value = (
            plain_projection(linear, (heads, self.head_dim))
            for linear, heads in (*sides, (attention.v_proj, self.kv_heads))
        )
        return ProjectionWeights(query[0], key[0], value[0], query[1], key[1], value[1])

    def key_source(self, attention: Any) -> torch.nn.Module:
        source: torch.nn.Module = attention.k_proj if self.norms == "none" else attention.k_norm
        return source

    def source_keys(self, output: torch.Tensor) -> torch.Tensor:
        return self._heads(output)

    def _norm(self, norm: Any, projected: torch.Tensor) -> torch.Tensor:
        if self.norms == "head":
            projected = projected.unflatten(-1, (-1, self.head_dim))
        normed: torch.Tensor = norm(projected)
        return normed

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, rows, heads * head_dim] or [batch, rows, heads, head_dim] with the heads in front of the rows."""
        batch, rows = states.shape[:2]
        return states.view(batch, rows, -1, self.head_dim).transpose(1, 2)
