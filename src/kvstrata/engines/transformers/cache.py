"""The face that a request shows to Transformers: a `Cache` whose rows live in the arena, not in the object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import Cache

from kvstrata.errors import Reason, StateError, UnsupportedError

if TYPE_CHECKING:
    from kvstrata.engines.transformers.request import Request

__all__ = ["RequestCache"]


class RequestCache(Cache):
    """Passed to `generate` or to a forward call as `past_key_values`. Belongs to one request."""

    def __init__(self, request: Request, layers: int) -> None:
        super().__init__(layers=[])
        self.request = request
        self._layers = layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark the new rows, [1, kv_heads, rows, head_dim], as this request's; the attention function stores them.

        Errors: `StateError` outside a step, where other attention functions would see these rows and no history.
        """
        if not self.request.in_step:
            raise StateError(
                Reason.CLOSED if self.request.closed else Reason.NOT_COMMITTED,
                "rows came outside a step of this request",
                "call the attached model itself, inside the `with` block, and none of its submodules",
            )
        key_states.kvstrata_request = self.request  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed rows, in tokens."""
        return self.request.frontier

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the keys a step of `query_length` rows sees."""
        return self.request.frontier + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: bounded by the budget, not by the object."""
        return -1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first new row."""
        return self.request.frontier

    def __len__(self) -> int:
        return self._layers

    def __repr__(self) -> str:
        return f"RequestCache({self.request.frontier} tokens)"

    @property
    def is_compileable(self) -> bool:
        """False: `generate` must not wrap the step in a graph."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True: nothing is allocated lazily."""
        return True

    @property
    def is_croppable(self) -> bool:
        """False: sealed rows are immutable."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """No layer slides."""
        return [False] * self._layers

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing for 0. Errors: `UnsupportedError` otherwise."""
        if tokens_to_remove != 0:
            self._refuse("crop", "assisted decoding and prompt look-up")

    def activate_past_recording(self) -> None:
        """Errors: `UnsupportedError`; called before drafts are computed, which are committed rows here."""
        self._refuse("activate_past_recording", "assisted decoding and prompt look-up")

    def reset(self) -> None:
        """Errors: `UnsupportedError`; ask the memory for a new request instead."""
        self._refuse("reset", "a new history needs a new request")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Errors: `UnsupportedError`."""
        self._refuse("reorder_cache", "beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Errors: `UnsupportedError`."""
        self._refuse("batch_repeat_interleave", "several sequences")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Errors: `UnsupportedError`."""
        self._refuse("batch_select_indices", "several sequences")

    def _refuse(self, call: str, what: str) -> NoReturn:
        raise UnsupportedError(
            Reason.OPERATION_UNSUPPORTED,
            f"{call} is not served ({what})",
            "generate one sequence at a time by greedy search or sampling",
        )
