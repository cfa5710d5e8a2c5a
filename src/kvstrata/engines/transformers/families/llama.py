"""Llama 1 to 3 and what shares its architecture (Touvron et al., 2023; Grattafiori et al., 2024)."""

from __future__ import annotations

from kvstrata.engines.transformers.families.separate import SeparateProjections

__all__ = ["Llama"]


class Llama(SeparateProjections):
    """Grouped queries, all layers alike, one rotary rule, no windows."""

    names = ("llama",)
    modeling = "transformers.models.llama.modeling_llama"
    prefix = "Llama"
