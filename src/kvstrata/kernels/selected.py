"""Attention over rows that were chosen one by one: the readable reference, in PyTorch, on any device.

Query heads may share the rows of their K/V head or have rows of their own. A log-bias enters the scores as it is: an
inverse inclusion probability, for one. The result is a partial state, so that other rows can be merged in exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.kernels.state import PartialState

__all__ = ["selected_state", "selected_weights"]


def selected_state(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    visible: Tensor | None = None,
    log_bias: Tensor | None = None,
) -> PartialState:
    """State [query_heads, rows] of `query` [query_heads, rows, head_dim] over chosen rows; computed in fp32.

    keys, values: [owners, n, head_dim], where the owners are query heads or K/V heads. visible: bool, broadcastable to
    [owners, rows, n]; False for entries that are no rows, or that a query row does not see. log_bias: fp32
    [query_heads, n], added to the scaled scores. Errors: `ConfigurationError` when the heads do not divide.
    """
    scores = _scores(query, keys, scale, visible, log_bias)
    owners, group, rows, count = scores.shape
    if count == 0:
        return PartialState.empty(owners * group, rows, head_dim=values.shape[-1], device=query.device)
    m = scores.amax(-1)
    weights = torch.exp(scores - m.masked_fill(m == -torch.inf, 0.0).unsqueeze(-1))
    # A row that is not visible has weight zero; its value must not turn that into NaN.
    rest = values.float()
    if visible is not None:
        rest = torch.where(_seen(visible, keys).any(1).unsqueeze(-1), rest, 0.0)
    u = (weights.flatten(1, 2) @ rest).view(owners, group, rows, -1)
    return PartialState(m.flatten(0, 1), weights.sum(-1).flatten(0, 1), u.flatten(0, 1))


def selected_weights(
    query: Tensor,
    keys: Tensor,
    state: PartialState,
    scale: float,
    visible: Tensor | None = None,
    log_bias: Tensor | None = None,
) -> Tensor:
    """Softmax weights [query_heads, rows, n] of the rows, where `state` is that of all rows attended, merged."""
    scores = _scores(query, keys, scale, visible, log_bias).flatten(0, 1)
    base = state.m.masked_fill(state.m == -torch.inf, 0.0).unsqueeze(-1)
    return torch.exp(scores - base) / state.l.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)


def _scores(query: Tensor, keys: Tensor, scale: float, visible: Tensor | None, log_bias: Tensor | None) -> Tensor:
    heads, rows, dim = query.shape
    owners, count = keys.shape[0], keys.shape[1]
    if heads % owners:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{heads} query heads do not divide over {owners} owners")
    group = heads // owners
    grouped = query.float().reshape(owners, group * rows, dim)
    scores = (grouped @ keys.float().transpose(-1, -2) * scale).view(owners, group, rows, count)
    if log_bias is not None:
        scores = scores + log_bias.reshape(owners, group, 1, count)
    if visible is not None:
        scores = scores.masked_fill(~_seen(visible, keys).unsqueeze(1), -torch.inf)
    return scores


def _seen(visible: Tensor, keys: Tensor) -> Tensor:
    """[owners, rows or 1, n]."""
    seen = visible if visible.dim() == 3 else visible.unsqueeze(-2)
    return seen.expand(keys.shape[0], seen.shape[-2], keys.shape[1])
