"""Exact causal attention for a block of new rows over a paged history.

The history is widened to fp32 piece by piece in a bounded workspace. Each piece, and the causal triangle of the new
rows themselves, gives an output and the logarithm of its softmax denominator; these are merged in fp32 (the identity
of `kvstrata.kernels.state`, on normalised outputs). Query heads that share a K/V head are folded into rows, so that a
piece is read once for the whole group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.kernels.block_table import BlockTable
from kvstrata.kernels.paged import torch_dtype
from kvstrata.kernels.prefill_workspace import PIECE_TOKENS, PrefillWorkspace, check_window, prefill_workspace_bytes

__all__ = ["PIECE_TOKENS", "PrefillWorkspace", "prefill_attention", "prefill_workspace_bytes"]

Gather = Callable[[BlockTable, int, int, Tensor, Tensor], None]


def prefill_attention(
    query: Tensor,
    table: BlockTable,
    past_tokens: int,
    key_new: Tensor,
    value_new: Tensor,
    scale: float,
    gather: Gather,
    workspace: PrefillWorkspace,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of n query rows at positions past_tokens, ..., past_tokens + n - 1 over all rows up to their own.

    `query` is [1, query_heads, n, head_dim]; `key_new` and `value_new` [1, kv_heads, n, head_dim] are the rows of the
    block itself, which need not be in `table` yet. `gather` is `DecodeAttention.gather`.

    With `window`, the row at position p sees the `window` tokens (p - window, p] only. Segments that hold no token of
    any row's window are not read, and their addresses may be invalid. `sinks` [query_heads] are one more score for each
    head whose value is zero (see `PartialState.with_sinks`).

    Returns [1, n, query_heads, head_dim], contiguous, of the cache dtype. Scores, softmax and merge are fp32 for every
    dtype.
    """
    layout = workspace.layout
    rows = query.shape[2] if query.dim() == 4 else 0
    kv_heads, group, dim = layout.kv_heads, layout.query_group, layout.head_dim
    if query.shape != (1, layout.query_heads, rows, dim) or not 1 <= rows <= workspace.rows:
        raise _invalid(f"query must be (1, {layout.query_heads}, 1..{workspace.rows}, {dim}), got {tuple(query.shape)}")
    if not key_new.shape == value_new.shape == (1, kv_heads, rows, dim):
        raise _invalid(
            f"key_new and value_new must be {(1, kv_heads, rows, dim)}, "
            f"got {tuple(key_new.shape)} and {tuple(value_new.shape)}"
        )
    if not 0 <= past_tokens <= table.capacity:
        raise _invalid(f"past_tokens must be from 0 to {table.capacity}, got {past_tokens}")
    if window is not None:
        check_window(window)
    if sinks is not None:
        if sinks.shape != (layout.query_heads,):
            raise _invalid(f"sinks must be ({layout.query_heads},), got {tuple(sinks.shape)}")
        sinks = sinks.detach().to(query.device, torch.float32).view(kv_heads, group, 1)

    most = rows if window is None else min(rows, window)
    q_space, new, pieces = workspace.carve(
        (layout.query_heads * most * dim,),
        (2, kv_heads, rows, dim),
        (2 * kv_heads * workspace.piece_tokens * dim,),
    )
    new[0].copy_(key_new[0])
    new[1].copy_(value_new[0])
    history = _History(table, past_tokens, new, gather, pieces, workspace.piece_tokens)
    result = None
    for begin in range(0, rows, most):
        end = min(rows, begin + most)
        q = q_space[: layout.query_heads * (end - begin) * dim].view(kv_heads, group, end - begin, dim)
        q.view(1, layout.query_heads, end - begin, dim).copy_(query[:, :, begin:end])
        out = _attend_block(q, past_tokens + begin, history, scale, window, sinks)
        if result is None:  # not earlier: the operator's buffers are free again now
            result = torch.empty((1, rows, layout.query_heads, dim), dtype=torch_dtype(layout), device=query.device)
        result[0, begin:end].view(end - begin, kv_heads, group, dim).copy_(out.permute(2, 0, 1, 3))
        del out
    assert result is not None
    return result


@dataclass(frozen=True)
class _History:
    """Rows as fp32 pieces: those before the block from the table, its own from `new`."""

    table: BlockTable
    past: int
    new: Tensor
    gather: Gather
    buffer: Tensor
    piece_tokens: int

    def piece(self, start: int, stop: int) -> Tensor:
        """K and V [2, kv_heads, stop - start, head_dim] of at most `piece_tokens` tokens; valid until the next call.

        A piece lies on one side of `past`: rows that follow a whole window of new rows do not see beyond those.
        """
        if start >= self.past:
            return self.new[:, :, start - self.past : stop - self.past]
        assert stop <= self.past
        heads, dim = self.new.shape[1], self.new.shape[3]
        piece = self.buffer[: 2 * heads * (stop - start) * dim].view(2, heads, stop - start, dim)
        self.gather(self.table, start, stop, piece[0], piece[1])
        return piece


def _attend_block(
    q: Tensor, position: int, history: _History, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Output [kv_heads, group, n, head_dim] of n rows `q` at `position`, ..., n at most `window`. Overwrites `q`."""
    kv_heads, group, rows, dim = q.shape
    seen_by_first, seen_by_all = 0, 0
    if window is not None:
        seen_by_first, seen_by_all = max(0, position + 1 - window), max(0, position + rows - window)
    key, value = history.new[:, :, None, position - history.past : position - history.past + rows]
    out, lse = _attend(q, key.expand(q.shape), value.expand(q.shape), scale, causal=True)

    folded = q.view(1, kv_heads, group * rows, dim)
    for start in range(seen_by_all, position, history.piece_tokens):
        key, value = history.piece(start, min(position, start + history.piece_tokens))
        more, more_lse = _attend(folded, key.unsqueeze(0), value.unsqueeze(0), scale, causal=False)
        _merge(out, lse, more.view(out.shape), more_lse.view(lse.shape))
        del more, more_lse  # before the next piece's are allocated: the workspace counts one

    if seen_by_first < seen_by_all:
        # Row i no longer sees the first i of these tokens. With rows and tokens in reverse order that is the causal
        # triangle again, without the last row, which sees none: no mask is built, and no row is left without a token.
        q.copy_(q.flip(2))
        out, lse = out.flip(2), lse.flip(2)
        for stop in range(seen_by_all, seen_by_first, -history.piece_tokens):
            start = max(seen_by_first, stop - history.piece_tokens)
            first = 1 + seen_by_all - stop
            shape = (kv_heads, group, stop - start, dim)
            key, value = history.piece(start, stop).flip(2).unsqueeze(2)
            more, more_lse = _attend(q[:, :, first:], key.expand(shape), value.expand(shape), scale, causal=True)
            _merge(out[:, :, first:], lse[:, :, first:], more, more_lse)
            del more, more_lse, key, value
        out, lse = out.flip(2), lse.flip(2)

    if sinks is not None:
        out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
    return out


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds a piece's normalised output and the logarithm of its denominator to those so far, in place."""
    merged = torch.logaddexp(lse, more_lse)
    out.mul_(lse.sub_(merged).exp_().unsqueeze(-1))
    out.addcmul_(more, (more_lse - merged).exp_().unsqueeze(-1))
    lse.copy_(merged)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Normalised output [b, h, q, d] and log of the softmax denominator [b, h, q], all fp32."""
    flash = _flash()
    if flash is not None and query.device.type == "cpu":
        out, lse = flash(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    scores = query @ key.transpose(-1, -2) * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(above, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return scores.sub_(lse.unsqueeze(-1)).exp_() @ value, lse


def _flash() -> Callable[..., tuple[Tensor, Tensor]] | None:
    # A private operator of PyTorch, and the only one on the CPU that also returns the denominators.
    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def _invalid(cause: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, cause)
