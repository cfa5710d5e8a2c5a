"""The attention function that Transformers calls during a step, registered only while a model is attached."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvstrata.errors import Reason, StateError

__all__ = ["register", "unregister"]


def register(name: str) -> None:
    """Enter the function into Transformers' registries under `name`, which must be the caller's own."""
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, _no_mask)


def unregister(name: str) -> None:
    """Take it out again."""
    ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    request = getattr(key, "kvstrata_request", None)
    if request is None:
        raise StateError(Reason.NOT_COMMITTED, "rows reached the attention function without passing through a request")
    return request.attend(module.layer_idx, query, key, value, kwargs["scaling"]), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask is built: a step is checked to be one unpadded sequence, and the kernels are causal by themselves."""
