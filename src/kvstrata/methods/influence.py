"""How much the rows of a history were used by the queries that followed them: three rules, in vectorised form.

They return fp32 [heads, n]; what is not finite counts as the least, or as nothing where it would be a weight. Heads are
K/V heads, or query heads, of which equally many follow each other on every K/V head.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["following_weights", "influence_of_keys", "influence_of_queries"]

_BLOCK = 64


def influence_of_queries(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Mean product of each key with the `window` queries after it (Xiao et al. 2024, InfLLM, section 3).

    keys: [kv_heads, n, head_dim] of consecutive rows. queries: [heads, n - 1 + window, head_dim] of the rows from the
    second on. Costs O((n + window) head_dim) through sums of queries, which are taken in double precision.
    """
    sums = torch.nn.functional.pad(queries.double().cumsum(1), (0, 0, 1, 0))
    count = keys.shape[1]
    spans = (sums[:, window : window + count] - sums[:, :count]).unflatten(0, (keys.shape[0], -1))
    return _finite((spans * keys.double().unsqueeze(1)).sum(-1).flatten(0, 1) / window)


def influence_of_keys(keys: Tensor) -> Tensor:
    """Mean product of each key with the keys of its unit: how far it speaks for them. keys: [heads, units, n, dim]."""
    each = keys.double()
    return _finite((each * each.mean(2, keepdim=True)).sum(-1).flatten(1))


def following_weights(
    queries: Tensor, keys: Tensor, near: Tensor, far_queries: Tensor, far_keys: Tensor, far: Tensor, scale: float
) -> Tensor:
    """Softmax weight that each near key got from all queries together, normalised over near and far keys jointly.

    queries, far_queries: [query_heads, rows, head_dim]. keys: [kv_heads, n, head_dim]; far_keys: [owners, m, head_dim].
    near: bool [rows, n]; far: bool, broadcastable to [owners, rows, m]; False for what a query does not see. Returns
    [query_heads, n].
    """
    heads, rows = queries.shape[:2]
    total = torch.zeros(heads, keys.shape[1], device=queries.device)
    seen = far.expand(far_keys.shape[0], rows, far_keys.shape[1])
    for start in range(0, rows, _BLOCK):
        part = slice(start, min(start + _BLOCK, rows))
        close = _scores(queries[:, part], keys, scale).masked_fill(~near[part], -torch.inf)
        distant = _scores(far_queries[:, part], far_keys, scale)
        distant = distant.masked_fill(~seen[:, part].repeat_interleave(heads // seen.shape[0], dim=0), -torch.inf)
        weights = torch.softmax(torch.cat((close, distant), dim=-1), dim=-1)
        total += torch.nan_to_num(weights[..., : keys.shape[1]]).sum(1)
    return total


def _scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    grouped = queries.float().unflatten(0, (keys.shape[0], -1))
    scores: Tensor = grouped @ keys.float().transpose(-1, -2).unsqueeze(1) * scale
    return scores.flatten(0, 1)


def _finite(values: Tensor) -> Tensor:
    limit = torch.finfo(torch.float32)
    return torch.where(values.isfinite(), values.clamp(limit.min, limit.max), limit.min).float()
