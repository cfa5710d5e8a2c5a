"""Keys as they are before their rotary position, which cannot be had back exactly from rotated ones in bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kvstrata.engines.transformers.families.base import Family

__all__ = ["capture_keys"]


@contextlib.contextmanager
def capture_keys(model: Any, family: Family, sink: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Inside the block, every forward pass calls `sink(layer, keys)` for each layer, in order.

    keys: [batch, kv_heads, rows, head_dim], after their norm, without gradients: a view of what the layer computed, so
    copy what you keep. An error that `sink` raises ends the forward pass. Nothing is left on the model after the block.
    """
    with contextlib.ExitStack() as hooks:
        for layer, attention in enumerate(family.attention_modules(model)):
            hook = partial(_deliver, family, sink, layer)
            hooks.callback(family.key_source(attention).register_forward_hook(hook).remove)
        yield


def _deliver(
    family: Family,
    sink: Callable[[int, torch.Tensor], None],
    layer: int,
    module: Any,
    inputs: Any,
    output: torch.Tensor,
) -> None:
    sink(layer, family.source_keys(output.detach()))
