"""One file for each model family: what its configuration decides, where its attention keeps it, what it refuses."""

from __future__ import annotations

from kvstrata.engines.transformers.families.base import Family, LayerRule
from kvstrata.engines.transformers.families.capture import capture_keys
from kvstrata.engines.transformers.families.refusal import Refusal
from kvstrata.engines.transformers.families.registry import FAMILIES, family_of, refusals
from kvstrata.engines.transformers.families.view import TransformersView

__all__ = ["FAMILIES", "Family", "LayerRule", "Refusal", "TransformersView", "capture_keys", "family_of", "refusals"]
