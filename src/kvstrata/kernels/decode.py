"""Decode attention over a block table: one query row per head, the history read where it lies.

Exact: the softmax is taken blockwise and merged in a fixed order (see `kvstrata.kernels.state`), so the native result
depends neither on the number of threads nor on where the segments lie. Runs natively on host memory, else in PyTorch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.kernels.block_table import BlockTable
from kvstrata.kernels.native import NativeLayout, load
from kvstrata.kernels.paged import append_rows, attend_pages, gather_rows, torch_dtype
from kvstrata.kernels.state import PartialState

__all__ = ["DecodeAttention"]


class DecodeAttention:
    """Attention and row movement for layers of one layout. Every call blocks until its result is in memory.

    `threads` counts the calling thread (default: PyTorch's intra-op threads); `level` names a native level or ``torch``
    (default: see `kvstrata.kernels.native.load`); `scale` multiplies the scores (default: head_dim ** -0.5). Calls from
    several threads are safe; while one uses the worker threads the others run alone.
    """

    def __init__(
        self, layout: SegmentLayout, threads: int | None = None, level: str | None = None, scale: float | None = None
    ) -> None:
        if threads is not None and threads < 1:
            raise _invalid(f"threads must be at least 1, got {threads}")
        self.layout = layout
        self.scale = layout.head_dim**-0.5 if scale is None else scale
        self.threads = threads or torch.get_num_threads()
        self._native = load(level)
        self._dtype = torch_dtype(layout)
        self._row_shape = (1, layout.kv_heads, 1, layout.head_dim)
        self._query_shape = (1, layout.query_heads, 1, layout.head_dim)
        self._query_stride = (layout.head_dim, 1)
        self._out_shape = (1, 1, layout.query_heads, layout.head_dim)
        self._struct = NativeLayout.of(layout)
        self._geometry = ctypes.addressof(self._struct)
        self._pool = self._native.create_pool(self.threads, self) if self._native else 0

    @property
    def level(self) -> str:
        """Native level in use, or ``torch``."""
        return self._native.level if self._native else "torch"

    def append_and_attend(
        self,
        key: Tensor,
        value: Tensor,
        query: Tensor,
        table: BlockTable,
        position: int,
        *,
        scale: float | None = None,
        start: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes the row at `position`, then attends over tokens [start, position].

        `key` and `value` are [1, kv_heads, 1, head_dim], `query` [1, query_heads, 1, head_dim], all of the cache dtype.
        `scale` and `sinks` as in `attend`. Returns [1, 1, query_heads, head_dim], contiguous, of the cache dtype.
        """
        native = self._native
        if native is None or not table.native:
            self._check_step(table, start, position)
            self.append(key, value, table, position)
            return self.attend(query, table, position + 1, scale=scale, start=start, sinks=sinks)
        if key.shape != self._row_shape or value.shape != self._row_shape:
            raise _invalid(f"key and value must be {self._row_shape}, got {tuple(key.shape)} and {tuple(value.shape)}")
        if not key.dtype == value.dtype == self._dtype:
            raise _invalid(f"key and value must be {self._dtype}, got {key.dtype} and {value.dtype}")
        query = self._checked_query(query)
        if sinks is not None:
            sinks = self._checked_sinks(sinks, query.device)
        key_stride, value_stride = key.stride(), value.stride()
        if key_stride[3] != 1 or value_stride[3] != 1:
            key, value = key.contiguous(), value.contiguous()
            key_stride, value_stride = key.stride(), value.stride()
        out = query.new_empty(self._out_shape)
        status = native.append_and_attend(
            self._geometry, self._pool, table.pointer, len(table.segments), start, position,
            key.data_ptr(), key_stride[1], value.data_ptr(), value_stride[1], query.data_ptr(),
            self.scale if scale is None else scale, None if sinks is None else sinks.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        if status:
            self._check_step(table, start, position)
            native.check(status)
        return out

    def append(self, key: Tensor, value: Tensor, table: BlockTable, start: int) -> None:
        """Writes `key` and `value` [1, kv_heads, n, head_dim] at token positions [start, start + n)."""
        rows = key.shape[2] if key.dim() == 4 else 0
        shape = (1, self.layout.kv_heads, rows, self.layout.head_dim)
        if key.shape != shape or value.shape != shape:
            raise _invalid(f"key and value must be {shape}, got {tuple(key.shape)} and {tuple(value.shape)}")
        if not key.dtype == value.dtype == self._dtype:
            raise _invalid(f"key and value must be {self._dtype}, got {key.dtype} and {value.dtype}")
        self._check_range(table, start, start + rows)
        if self._native is None or not table.native:
            append_rows(table, key[0], value[0], start)
            return
        if key.stride(3) != 1 or value.stride(3) != 1:
            key, value = key.contiguous(), value.contiguous()
        status = self._native.append(
            self._geometry, table.pointer, len(table.segments), start, rows,
            key.data_ptr(), key.stride(1), key.stride(2), value.data_ptr(), value.stride(1), value.stride(2),
        )  # fmt: skip
        self._native.check(status)

    def attend(
        self,
        query: Tensor,
        table: BlockTable,
        tokens: int,
        *,
        scale: float | None = None,
        start: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of `query` [1, query_heads, 1, head_dim] over tokens [start, tokens).

        - scale: multiplies the scores (default: `self.scale`).
        - start: first token that is seen; for a sliding window of w tokens, max(0, tokens - w). Segments that hold none
          of the tokens are not read, and their addresses may be invalid.
        - sinks: [query_heads], one more score for each head whose value is zero (see `PartialState.with_sinks`);
          converted unless fp32 and contiguous.

        Returns [1, 1, query_heads, head_dim], contiguous, of the cache dtype; zeros for no tokens.
        """
        query = self._checked_query(query)
        self._check_range(table, start, tokens)
        scale = self.scale if scale is None else scale
        if sinks is not None:
            sinks = self._checked_sinks(sinks, query.device)
        if self._native is None or not table.native:
            state = attend_pages(table, query.view(self._out_shape[2:]), start, tokens, scale)
            if sinks is not None:
                state = state.with_sinks(sinks.detach())
            return state.output(self._dtype).view(self._out_shape)
        out = query.new_empty(self._out_shape)
        status = self._native.attend(
            self._geometry, self._pool, table.pointer, len(table.segments), start, tokens, query.data_ptr(),
            scale, None if sinks is None else sinks.data_ptr(), out.data_ptr(), None, None, None,
        )  # fmt: skip
        self._native.check(status)
        return out

    def partial(
        self, query: Tensor, table: BlockTable, start: int, stop: int, *, scale: float | None = None
    ) -> PartialState:
        """State [query_heads] of `query` [1, query_heads, 1, head_dim] over tokens [start, stop); see `attend`."""
        query = self._checked_query(query)
        self._check_range(table, start, stop)
        scale = self.scale if scale is None else scale
        if self._native is None or not table.native:
            return attend_pages(table, query.view(self._out_shape[2:]), start, stop, scale)
        heads, dim = self._out_shape[2:]
        state = PartialState(torch.empty(heads), torch.empty(heads), torch.empty(heads, dim))
        status = self._native.attend(
            self._geometry, self._pool, table.pointer, len(table.segments), start, stop,
            query.data_ptr(), scale, None, None, state.m.data_ptr(), state.l.data_ptr(), state.u.data_ptr(),
        )  # fmt: skip
        self._native.check(status)
        return state

    def gather(self, table: BlockTable, start: int, stop: int, out_k: Tensor, out_v: Tensor) -> None:
        """Copies tokens [start, stop) to `out_k` and `out_v` [kv_heads, stop - start, head_dim].

        The outputs are of the cache dtype or fp32, with contiguous rows; heads may lie further apart.
        """
        self._check_range(table, start, stop)
        shape = (self.layout.kv_heads, stop - start, self.layout.head_dim)
        if out_k.shape != shape or out_v.shape != shape:
            raise _invalid(f"out_k and out_v must be {shape}, got {tuple(out_k.shape)} and {tuple(out_v.shape)}")
        if out_k.dtype != out_v.dtype or out_k.dtype not in (self._dtype, torch.float32):
            raise _invalid(f"out_k and out_v must both be {self._dtype} or float32, got {out_k.dtype}, {out_v.dtype}")
        if start == stop:
            return
        rows = (self.layout.head_dim, 1)
        if out_k.stride() != out_v.stride() or out_k.stride()[1:] != rows:
            raise _invalid(f"out_k and out_v must have contiguous rows and equal strides, got {out_k.stride()}")
        if self._native is None or not table.native or out_k.device.type != "cpu":
            gather_rows(table, start, stop, out_k, out_v)
            return
        status = self._native.gather(
            self._geometry, self._pool, table.pointer, len(table.segments), start, stop,
            out_k.data_ptr(), out_v.data_ptr(), out_k.stride(0), int(out_k.dtype != self._dtype),
        )  # fmt: skip
        self._native.check(status)

    def _checked_query(self, query: Tensor) -> Tensor:
        if query.shape != self._query_shape or query.dtype != self._dtype:
            raise _invalid(f"query must be {self._dtype} {self._query_shape}, got {query.dtype} {tuple(query.shape)}")
        return query if query.stride()[1::2] == self._query_stride else query.contiguous()

    def _checked_sinks(self, sinks: Tensor, device: torch.device) -> Tensor:
        if sinks.shape != self._query_shape[1:2]:
            raise _invalid(f"sinks must be {self._query_shape[1:2]}, got {tuple(sinks.shape)}")
        if sinks.dtype == torch.float32 and sinks.device == device and sinks.is_contiguous():
            return sinks  # a decode step's usual case: even conversions that change nothing cost microseconds
        return sinks.to(device, torch.float32).contiguous()

    def _check_step(self, table: BlockTable, start: int, position: int) -> None:
        self._check_range(table, position, position + 1)
        if not 0 <= start <= position:
            raise _invalid(f"start must be from 0 to the position {position}, got {start}")

    def _check_range(self, table: BlockTable, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= table.capacity:
            raise _invalid(f"tokens must be a range inside [0, {table.capacity}), got [{start}, {stop})")


def _invalid(cause: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, cause)
