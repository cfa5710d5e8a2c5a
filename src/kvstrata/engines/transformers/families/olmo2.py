"""OLMo 2 (OLMo Team, 2024): the norms stand behind attention, and one norm spans a whole projection."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.engines.transformers.families.separate import SeparateProjections

__all__ = ["Olmo2"]


class Olmo2(SeparateProjections):
    """Attention reads the residual stream as it is."""

    names = ("olmo2",)
    modeling = "transformers.models.olmo2.modeling_olmo2"
    prefix = "Olmo2"
    norms = "projection"

    def input_norm(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
