"""The cache that a compiled forward is traced with: it has no history and no lengths."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.engines.transformers.rowless_cache import RowlessCache

__all__ = ["StepCache"]


class StepCache(RowlessCache):
    """What the traced forward is given as its cache. Its lengths are constants: a step has its positions by itself, and
    a length that changes would be compiled again at every step."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0
