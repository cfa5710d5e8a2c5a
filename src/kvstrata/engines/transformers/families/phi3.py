"""Phi-3 (Abdin et al., 2024): queries, keys and values come from one matrix, part of each head is rotated."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.engines.transformers.families.base import Family, windows_everywhere
from kvstrata.engines.transformers.families.weights import plain_projection
from kvstrata.ports import ProjectionWeights

__all__ = ["Phi3"]


class Phi3(Family):
    """The matrix holds all queries, then all keys, then all values."""

    names = ("phi3",)
    modeling = "transformers.models.phi3.modeling_phi3"
    prefix = "Phi3"

    def windows(self) -> tuple[int | None, ...]:
        return windows_everywhere(self.config)

    def project(self, attention: Any, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._parts(attention.qkv_proj(normed))

    def projection_weights(self, attention: Any) -> ProjectionWeights:
        weight, bias = plain_projection(attention.qkv_proj, (sum(self._heads()), self.head_dim))
        query, key, value = weight.split(self._heads())
        if bias is None:
            return ProjectionWeights(query, key, value)
        return ProjectionWeights(query, key, value, *bias.split(self._heads()))

    def key_source(self, attention: Any) -> torch.nn.Module:
        source: torch.nn.Module = attention.qkv_proj
        return source

    def source_keys(self, output: torch.Tensor) -> torch.Tensor:
        return self._parts(output)[1]

    def _heads(self) -> tuple[int, int, int]:
        return self.query_heads, self.kv_heads, self.kv_heads

    def _parts(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = output.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split(self._heads(), dim=1)
        return query, key, value
