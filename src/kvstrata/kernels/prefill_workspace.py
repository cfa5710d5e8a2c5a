"""The memory of prefill attention: one buffer that all layers share, and how many bytes a call needs."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["PIECE_TOKENS", "PrefillWorkspace", "check_window", "prefill_workspace_bytes"]

PIECE_TOKENS = 2048
"""Tokens of history widened at a time. Below about 1024 the attention operator loses speed."""


class PrefillWorkspace:
    """Buffers of `prefill_attention` for blocks of up to `rows` rows; reused by all layers of one layout.

    Not for two threads at once.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        rows: int,
        piece_tokens: int = PIECE_TOKENS,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_sizes(rows, piece_tokens)
        self.layout = layout
        self.rows = rows
        self.piece_tokens = piece_tokens
        self._buffer = torch.empty(_held_floats(layout, rows, piece_tokens), device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held. The transient rest of `prefill_workspace_bytes` is allocated and freed inside each call."""
        return self._buffer.nbytes

    def carve(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Disjoint fp32 views of the buffer."""
        views, at = [], 0
        for shape in shapes:
            size = torch.Size(shape).numel()
            views.append(self._buffer[at : at + size].view(shape))
            at += size
        return views


def prefill_workspace_bytes(
    layout: SegmentLayout, rows: int, piece_tokens: int = PIECE_TOKENS, window: int | None = None
) -> int:
    """Bytes that `prefill_attention` uses on the CPU beyond its inputs and its output, for a block of `rows` rows.

    Counts the `PrefillWorkspace` and what each call allocates for a moment: two fp32 outputs, the logarithms of their
    denominators, the score blocks of PyTorch's attention operator, one for each of its threads, and, with a `window` in
    tokens, one reversed piece. The workspace itself does not depend on the window, and a layer without one needs no
    more than a layer with one.
    """
    _check_sizes(rows, piece_tokens)
    outputs = 2 * layout.query_heads * rows * layout.head_dim
    denominators = 4 * layout.query_heads * rows
    triangle = _operator_floats(layout, rows, rows)
    operator = max(triangle, _operator_floats(layout, layout.query_group * rows, piece_tokens))
    reversed_piece = 0
    if window is not None:
        check_window(window)
        reversed_piece = 2 * layout.kv_heads * min(piece_tokens, rows - 1, window - 1) * layout.head_dim
    return 4 * (_held_floats(layout, rows, piece_tokens) + outputs + denominators + operator + reversed_piece)


def _held_floats(layout: SegmentLayout, rows: int, piece_tokens: int) -> int:
    query = layout.query_heads * rows
    return layout.head_dim * (query + 2 * layout.kv_heads * rows + 2 * layout.kv_heads * piece_tokens)


def _operator_floats(layout: SegmentLayout, query_rows: int, key_rows: int) -> int:
    # Block sizes read from PyTorch's CPU flash attention (2.9 to 2.13): scores, two running values and the output of
    # each block of query rows, for each thread.
    block = min(query_rows, 256 if query_rows >= 768 else 64 if query_rows >= 192 else 32)
    return torch.get_num_threads() * block * (min(key_rows, 512) + 2 + layout.head_dim)


def _check_sizes(rows: int, piece_tokens: int) -> None:
    if rows < 1:
        raise _invalid(f"rows must be at least 1, got {rows}")
    if piece_tokens < 1:
        raise _invalid(f"piece_tokens must be at least 1, got {piece_tokens}")


def check_window(window: int) -> None:
    """Raises `ConfigurationError` for a window of no tokens."""
    if window < 1:
        raise _invalid(f"window must be at least 1, got {window}")


def _invalid(cause: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, cause)
