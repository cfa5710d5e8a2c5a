"""Histories of a given length without reading a text: random rows, committed like computed ones."""

from __future__ import annotations

import torch

from kvstrata.engines.transformers import Memory, Request

__all__ = ["fill"]

_STEP = 512


def fill(memory: Memory, tokens: int, seed: int = 0) -> Request:
    """A request with `tokens` committed random rows.

    Timing does not depend on the content of the rows; the answers of such a history mean nothing.
    """
    abi, layout = memory.context.abi, memory.layout
    generator = torch.Generator().manual_seed(seed)
    shape = (abi.layers, 2, 1, layout.kv_heads, tokens, layout.head_dim)
    rows = torch.randn(shape, generator=generator).to(getattr(torch, layout.dtype))
    request = memory.request()
    for start in range(0, tokens, _STEP):
        stop = min(tokens, start + _STEP)
        memory.activate(request, [stop - start])
        for layer in range(abi.layers):
            (table,) = request.plan.before_layer(layer)
            key, value = rows[layer, :, :, :, start:stop]
            memory.kernel.append(key, value, table, start)
            request.plan.after_layer(layer)
        for record in request.history.commit(stop - start, [3 + i % 1000 for i in range(start, stop)]):
            memory.publish(record)
    return request
