"""`ModelView` over a live Transformers model."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvstrata.engines.transformers.families.base import Family
from kvstrata.engines.transformers.families.registry import family_of
from kvstrata.ports import ProjectionWeights

__all__ = ["TransformersView"]


class TransformersView:
    """What the model itself computes, one layer's part at a time, with its own modules and functions.

    family: the model's, if it is known already. Errors: `UnsupportedError` for a model that is not served.
    """

    def __init__(self, model: Any, family: Family | None = None) -> None:
        self._model = model
        self.family = family or family_of(model)
        self._layers = self.family.layer_modules(model)
        self._attention = self.family.attention_modules(model)
        self._apply_rotary = sys.modules[self.family.modeling].apply_rotary_pos_emb

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.family.layers

    @property
    def query_heads(self) -> int:
        """Query heads of every layer."""
        return self.family.query_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads of every layer."""
        return self.family.kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head of one row."""
        return self.family.head_dim

    @property
    def scale(self) -> float:
        """What the scores are multiplied by before the softmax."""
        return self.family.scale

    @torch.no_grad()
    def input_norm(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `ModelView.input_norm`."""
        return self.family.input_norm(self._layers[layer], hidden)

    @torch.no_grad()
    def project(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `ModelView.project`."""
        query, key, value = self.family.project(self._attention[layer], normed[None])
        return query[0], key[0], value[0]

    @torch.no_grad()
    def rotate(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `ModelView.rotate`."""
        cos, sin = self.family.cosines(self._model, layer, states, positions[None])
        # The model's function turns two tensors; the second has no heads.
        turned: torch.Tensor = self._apply_rotary(states[None], states[None, :0], cos, sin)[0]
        return turned[0]

    def projection_weights(self, layer: int) -> ProjectionWeights:
        """See `ModelView.projection_weights`."""
        return self.family.projection_weights(self._attention[layer])
