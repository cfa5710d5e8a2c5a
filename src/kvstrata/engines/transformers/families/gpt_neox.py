"""GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023): one matrix, with the three sides head by head."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.engines.transformers.families.base import Family
from kvstrata.engines.transformers.families.weights import plain_projection
from kvstrata.ports import ProjectionWeights

__all__ = ["GptNeoX"]


class GptNeoX(Family):
    """Each head's query, key and value lie side by side; as many key heads as query heads."""

    names = ("gpt_neox",)
    modeling = "transformers.models.gpt_neox.modeling_gpt_neox"
    prefix = "GPTNeoX"
    layer_suffix = "Layer"
    attention_name = "attention"

    def project(self, attention: Any, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._parts(attention.query_key_value(normed))

    def projection_weights(self, attention: Any) -> ProjectionWeights:
        weight, bias = plain_projection(attention.query_key_value, (self.query_heads, 3, self.head_dim))
        query, key, value = weight.unbind(1)
        if bias is None:
            return ProjectionWeights(query, key, value)
        return ProjectionWeights(query, key, value, *bias.unbind(1))

    def key_source(self, attention: Any) -> torch.nn.Module:
        source: torch.nn.Module = attention.query_key_value
        return source

    def source_keys(self, output: torch.Tensor) -> torch.Tensor:
        return self._parts(output)[1]

    def _parts(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = output.unflatten(-1, (self.query_heads, 3, self.head_dim)).transpose(1, 2).unbind(3)
        return query, key, value
