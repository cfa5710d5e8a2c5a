"""Mistral (Jiang et al., 2023): Llama with one sliding window for all layers, or none."""

from __future__ import annotations

from collections.abc import Iterator

from kvstrata.engines.transformers.families.base import windows_everywhere
from kvstrata.engines.transformers.families.refusal import Refusal
from kvstrata.engines.transformers.families.separate import SeparateProjections

__all__ = ["Mistral"]


class Mistral(SeparateProjections):
    """Windows in all layers or in none."""

    names = ("mistral",)
    modeling = "transformers.models.mistral.modeling_mistral"
    prefix = "Mistral"

    def windows(self) -> tuple[int | None, ...]:
        return windows_everywhere(self.config)

    def refusals(self) -> Iterator[Refusal]:
        # The model masks all layers alike, while the stock cache would trim by layer type.
        if getattr(self.config, "layer_types", None) is not None:
            yield Refusal("layer_types_not_read", "layer_types is set, which mistral's attention does not read")
