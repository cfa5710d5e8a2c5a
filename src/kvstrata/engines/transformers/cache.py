"""The face that a request shows to Transformers: a `Cache` whose rows live in the arena, not in the object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvstrata.engines.transformers.rowless_cache import RowlessCache
from kvstrata.errors import ConfigurationError, Reason, StateError, UnsupportedError

if TYPE_CHECKING:
    from kvstrata.engines.transformers.request import Request

__all__ = ["RequestCache"]


class RequestCache(RowlessCache):
    """Passed to `generate` or to a forward call as `past_key_values`. Belongs to one request."""

    def __init__(self, request: Request, layers: int) -> None:
        super().__init__(layers)
        self.request = request

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark new rows, [batch, kv_heads, columns, head_dim], as this request's; the attention function stores them.

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
        """Columns so far: rows of a sequence and its padding, in tokens."""
        return self.request.width

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the keys a step of `query_length` columns sees."""
        return self.request.width + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The first new column."""
        return self.request.width

    def __repr__(self) -> str:
        sizes = ", ".join(str(row.frontier) for row in self.request.rows)
        return f"RequestCache({sizes} tokens)"

    @property
    def is_croppable(self) -> bool:
        """True."""
        return True

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return len(self.request.rows)

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """True: the last rows can always be taken back."""
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last columns: minus their number, or (old form) the length to keep. 0 does nothing.

        Rows of a sealed chunk that is cut are computed again by the next step. Errors: `StateError` during a step.
        """
        self._require_idle()
        width = self.request.width
        if tokens_to_remove > 0:
            self.request.crop(min(width, tokens_to_remove))
        elif tokens_to_remove < 0:
            self.request.crop(max(0, width + tokens_to_remove))

    def activate_past_recording(self) -> None:
        """Drafts follow: what a call computes for several candidates stays open until the next call."""
        self._require_idle()
        self.request.record_drafts()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Go on with these beams. Rows computed from here on are never committed: any beam may be dropped later."""
        self._select(beam_idx.tolist(), beams=True)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, copies beside the original."""
        if repeats < 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"repeats is {repeats}", "use 1 or more")
        self._select([index for index in range(len(self.request.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with these sequences."""
        self._select(indices.tolist())

    def reset(self) -> NoReturn:
        """Errors: `UnsupportedError`; ask the memory for a new request instead."""
        raise UnsupportedError(
            Reason.OPERATION_UNSUPPORTED,
            "reset is not served: a new history needs a new request",
            "pass **memory.generate_kwargs() again",
        )

    def _select(self, indices: list[int], *, beams: bool = False) -> None:
        self._require_idle()
        count = len(self.request.rows)
        if not indices or not all(-count <= index < count for index in indices):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"sequences {indices} of a request of {count}", f"use numbers below {count}"
            )
        self.request.select([index % count for index in indices], beams=beams)

    def _require_idle(self) -> None:
        self.request.require_open()
        if self.request.in_step:
            raise StateError(Reason.NOT_COMMITTED, "the cache was changed during a step", "wait until the call ends")
