"""The cache that a compiled forward is traced with: it has no history and no lengths."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

__all__ = ["StepCache"]


class StepCache(Cache):
    """What the traced forward is given as its cache. Its lengths are constants: a step has its positions by itself, and
    a length that changes would be compiled again at every step."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self._layers = layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def __len__(self) -> int:
        return self._layers

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._layers
