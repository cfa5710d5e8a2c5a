"""Qwen3 (Yang et al., 2025): Qwen2 without biases, with a norm over each head of queries and keys."""

from __future__ import annotations

from kvstrata.engines.transformers.families.base import windows_by_layer_type
from kvstrata.engines.transformers.families.separate import SeparateProjections

__all__ = ["Qwen3"]


class Qwen3(SeparateProjections):
    """Normalised queries and keys; windows by layer type."""

    names = ("qwen3",)
    modeling = "transformers.models.qwen3.modeling_qwen3"
    prefix = "Qwen3"
    norms = "head"

    def windows(self) -> tuple[int | None, ...]:
        return windows_by_layer_type(self.config)
