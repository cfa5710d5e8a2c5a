"""The families that are served, and the way from a model to its family or to the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstrata.engines.transformers.families.base import Family
from kvstrata.engines.transformers.families.configurations import architecture_refusals, setting_refusals
from kvstrata.engines.transformers.families.gemma3 import Gemma3
from kvstrata.engines.transformers.families.gpt_neox import GptNeoX
from kvstrata.engines.transformers.families.gpt_oss import GptOss
from kvstrata.engines.transformers.families.live import live_refusals
from kvstrata.engines.transformers.families.llama import Llama
from kvstrata.engines.transformers.families.mistral import Mistral
from kvstrata.engines.transformers.families.olmo2 import Olmo2
from kvstrata.engines.transformers.families.phi3 import Phi3
from kvstrata.engines.transformers.families.qwen2 import Qwen2
from kvstrata.engines.transformers.families.qwen3 import Qwen3
from kvstrata.engines.transformers.families.refusal import Refusal
from kvstrata.errors import Reason, UnsupportedError

__all__ = ["FAMILIES", "family_of", "refusals"]

FAMILIES: tuple[type[Family], ...] = (Gemma3, GptNeoX, GptOss, Llama, Mistral, Olmo2, Phi3, Qwen2, Qwen3)
"""Every family that is served."""


def family_of(model_or_config: Any) -> Family:
    """The family of a Transformers model, or of a configuration alone, bound to that configuration.

    A model's live modules are checked as well; nothing is computed or changed. Errors: `UnsupportedError` with
    `Reason.MODEL_UNSUPPORTED` and the first of `refusals`.
    """
    for refusal in refusals(model_or_config):
        raise UnsupportedError(Reason.MODEL_UNSUPPORTED, refusal.cause, refusal.next_step)
    family = _known(_config(model_or_config))
    assert family is not None
    return family


def refusals(model_or_config: Any) -> Iterator[Refusal]:
    """Every reason why a model or configuration is not served, the most telling first; none if it is."""
    config = _config(model_or_config)
    family, refused = _known(config), False
    for refusal in architecture_refusals(config):
        refused = True
        yield refusal
    if family is None:
        served = ", ".join(sorted(name for known in FAMILIES for name in known.names))
        kind = getattr(config, "model_type", None)
        yield Refusal("unknown_family", f"model_type={kind!r} is not served; families served: {served}")
    if family is None or refused:
        return
    for refusal in setting_refusals(family):
        refused = True
        yield refusal
    if not refused and model_or_config is not config:
        yield from live_refusals(model_or_config, family)


def _config(model_or_config: Any) -> Any:
    return getattr(model_or_config, "config", model_or_config)


def _known(config: Any) -> Family | None:
    kind = getattr(config, "model_type", None)
    return next((family(config) for family in FAMILIES if kind in family.names), None)
