"""Transformers' own cache and attention, for comparisons with the same model object."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

from kvstrata.engines.transformers.request import Request
from kvstrata.engines.transformers.versions import cache_keyword

__all__ = ["STOCK_ATTENTION", "filled_stock_cache", "stock_attention", "stock_cache", "stock_forward", "stock_prefill"]

STOCK_ATTENTION = ("sdpa", "eager")
"""Names of the attention functions that every supported model has."""


def stock_cache(model: Any) -> Any:
    """An empty `DynamicCache` for `model`."""
    return DynamicCache(config=model.config)


def filled_stock_cache(request: Request) -> Any:
    """A `DynamicCache` with a copy of the committed rows of `request`, which must all be in memory.

    Allocates the whole history once more. Blocks.
    """
    memory = request.memory
    layout, rows = memory.layout, request.frontier
    cache = stock_cache(memory.model)
    for layer, table in enumerate(request.plan.tables[0].layers):
        key, value = (
            torch.empty(layout.kv_heads, rows, layout.head_dim, dtype=memory.model.dtype, device=memory.device)
            for _ in range(2)
        )
        memory.kernel.gather(table, 0, rows, key, value)
        cache.update(key[None], value[None], layer)
    return cache


@contextlib.contextmanager
def stock_attention(model: Any, name: str) -> Iterator[None]:
    """Inside the block, calls without a kvstrata request use the attention function `name`.

    A model that is attached needs `memory.stock()` around it.
    """
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def stock_forward(model: Any, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Compute rows `token_ids` [1, rows] on top of `cache`; the last row's logits [1, 1, vocabulary]."""
    given: dict[str, Any] = {cache_keyword(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1
    with torch.no_grad():
        logits: torch.Tensor = model(token_ids, **given).logits
    return logits[:, -1:]


def stock_prefill(
    model: Any, token_ids: list[int], cache: Any, chunk: int, progress: Callable[[int, int], None]
) -> None:
    """Compute all but the last of `token_ids` in slices of `chunk` rows, as `Memory.prefill` does.

    progress: called with (tokens done, tokens in all) after every slice.
    """
    total = len(token_ids) - 1
    for start in range(0, total, chunk):
        stop = min(total, start + chunk)
        stock_forward(model, torch.tensor([token_ids[start:stop]], device=model.device), cache)
        progress(stop, total)
