"""GPT-OSS (OpenAI, 2025): mixture of experts, alternating windows, and a learned sink for every query head."""

from __future__ import annotations

from kvstrata.engines.transformers.families.base import windows_by_layer_type
from kvstrata.engines.transformers.families.separate import SeparateProjections

__all__ = ["GptOss"]


class GptOss(SeparateProjections):
    """Sinks in all layers; windows by layer type."""

    names = ("gpt_oss",)
    modeling = "transformers.models.gpt_oss.modeling_gpt_oss"
    prefix = "GptOss"
    has_sinks = True

    def windows(self) -> tuple[int | None, ...]:
        return windows_by_layer_type(self.config)
