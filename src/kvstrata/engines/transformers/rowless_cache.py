"""What the caches that models get here have in common: they hold no rows."""

from __future__ import annotations

from transformers.cache_utils import Cache

__all__ = ["RowlessCache"]


class RowlessCache(Cache):
    """A `Cache` without layers of its own, for a model of `layers` layers that all keep every row."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self._layers = layers

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: bounded by the budget, not by the object."""
        return -1

    def __len__(self) -> int:
        return self._layers

    @property
    def is_compileable(self) -> bool:
        """False: `generate` must not wrap the step in a graph; `attach(..., compile=True)` does that."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True: nothing is allocated lazily."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """No layer forgets rows, not even one that attends to a window of them."""
        return [False] * self._layers

    @property
    def is_linear(self) -> list[bool]:
        """No layer is a linear one."""
        return [False] * self._layers

    @property
    def is_dummy(self) -> list[bool]:
        """Every layer has rows."""
        return [False] * self._layers
