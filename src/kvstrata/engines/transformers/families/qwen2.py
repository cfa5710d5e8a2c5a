"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on the projections; the upper layers may slide."""

from __future__ import annotations

from kvstrata.engines.transformers.families.base import windows_by_layer_type
from kvstrata.engines.transformers.families.separate import SeparateProjections

__all__ = ["Qwen2"]


class Qwen2(SeparateProjections):
    """Windows by layer type."""

    names = ("qwen2",)
    modeling = "transformers.models.qwen2.modeling_qwen2"
    prefix = "Qwen2"

    def windows(self) -> tuple[int | None, ...]:
        return windows_by_layer_type(self.config)
