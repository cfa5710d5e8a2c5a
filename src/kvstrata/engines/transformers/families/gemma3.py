"""Gemma 3, the text model (Gemma Team, 2025): sliding and global layers with a rotary base each."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.engines.transformers.families.base import windows_by_layer_type
from kvstrata.engines.transformers.families.separate import SeparateProjections

__all__ = ["Gemma3"]


class Gemma3(SeparateProjections):
    """Normalised queries and keys; scores scaled by a setting of their own."""

    names = ("gemma3_text",)
    modeling = "transformers.models.gemma3.modeling_gemma3"
    prefix = "Gemma3"
    decoder_suffix = "TextModel"
    norms = "head"
    rope_per_layer_type = True

    @property
    def scale(self) -> float:
        return float(self.config.query_pre_attn_scalar**-0.5)

    def windows(self) -> tuple[int | None, ...]:
        return windows_by_layer_type(self.config)

    def cosines(
        self, model: Any, layer: int, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(model)(states, positions, self.config.layer_types[layer])
        return cos, sin

    def source_keys(self, output: torch.Tensor) -> torch.Tensor:
        # The norm comes after the heads have been moved to the front.
        return output
