"""Random hyperplanes: codes of vectors, collisions of codes, and how likely a row is to collide.

A table cuts space by `bits` random planes through the origin; two vectors at an angle a fall on the same side of one
with probability p = 1 - a / pi (Charikar 2002, "Similarity estimation techniques from rounding algorithms"), and so
agree in a whole table with r = p ** bits. MagicPIG (Chen et al. 2024, "MagicPIG: LSH sampling for efficient LLM
generation", section 4) samples a row that agrees in at least two of `tables` tables, which has probability

    u = 1 - (1 - r) ** tables - tables * r * (1 - r) ** (tables - 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "MAX_BITS",
    "ROWS_PER_PASS",
    "code_dtype",
    "collision_counts",
    "cosines",
    "inclusion_probability",
    "log_inclusion_probability",
    "simhash",
]

MAX_BITS = 24
"""Bits of one code: what fp32 counts exactly."""

PROJECTIONS_PER_PASS = 1 << 22
"""fp32 numbers that hashing holds at a time, twice."""

ROWS_PER_PASS = 1 << 14
"""Rows whose collisions are counted at a time."""

# Rows with a smaller p are never sampled; the floor keeps u above the smallest float64 for `MAX_BITS` bits.
_LEAST_P = 1e-6
# Below this many expected collisions 1 - (1 - r)^L - L r (1 - r)^(L - 1) loses digits, and a series does not.
_SERIES_BELOW = 1e-2


def code_dtype(bits: int) -> torch.dtype:
    """The smallest integer that holds a code of so many bits."""
    return torch.uint8 if bits <= 8 else torch.int16 if bits <= 15 else torch.int32


def simhash(vectors: Tensor, projectors: Tensor, tables: int, centre: Tensor | None = None) -> Tensor:
    """Codes [heads, tables, n] of `vectors` [heads, n, head_dim], in `code_dtype`.

    centre: [heads, head_dim], subtracted first. projectors: fp32 [heads or 1, head_dim, tables * bits], columns of one
    table together. Bit i has weight 2 ** i and is set where the projection is strictly positive, so that a zero vector
    has the code 0. Computed in fp32 and in passes of bounded size; a projection that is zero to rounding may have
    either sign in passes of another size.
    """
    heads, count, _ = vectors.shape
    bits = projectors.shape[-1] // tables
    weights = 2.0 ** torch.arange(bits, dtype=torch.float32, device=vectors.device)
    codes = torch.empty(heads, tables, count, dtype=code_dtype(bits), device=vectors.device)
    step = max(1, PROJECTIONS_PER_PASS // max(1, heads * tables * bits))
    for start in range(0, count, step):
        some = vectors[:, start : start + step].float()
        some = some if centre is None else some - centre.unsqueeze(1)
        signs = (some @ projectors > 0).float().view(heads, -1, tables, bits)
        codes[:, :, start : start + step] = (signs @ weights).transpose(-1, -2)
    return codes


def collision_counts(query_codes: Tensor, codes: Tensor) -> Tensor:
    """int16 [heads, group, n]: tables in which `query_codes` [heads, tables, group] and `codes` [heads, tables, n]
    agree. In passes over the rows."""
    heads, tables, count = codes.shape
    wanted = query_codes.transpose(-1, -2).contiguous()
    counts = torch.zeros(heads, wanted.shape[1], count, dtype=torch.int16, device=codes.device)
    for start in range(0, count, ROWS_PER_PASS):
        total = counts[:, :, start : start + ROWS_PER_PASS]
        few, hits = torch.zeros_like(total, dtype=torch.uint8), torch.empty_like(total, dtype=torch.bool)
        # One table at a time keeps the pass in the cache, and bytes are added fast: as many as a byte can count.
        for table in range(tables):
            row_codes = codes[:, None, table, start : start + ROWS_PER_PASS]
            few += torch.eq(row_codes, wanted[:, :, table, None], out=hits).view(torch.uint8)
            if table % 255 == 254 or table == tables - 1:
                total += few
                few.zero_()
    return counts


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """fp32 [..., g, n] between `queries` [..., g, head_dim] and `keys` [..., n, head_dim], within [-1, 1].

    A vector of zero length has the code 0 in every table. Against it any other vector's bits are fair coins, as at a
    right angle: the cosine is 0. Two such vectors always collide: it is 1.
    """
    q, k = _unit(queries), _unit(keys)
    both = ~q.any(-1, keepdim=True) & ~k.any(-1).unsqueeze(-2)
    return (q @ k.transpose(-1, -2)).clamp(-1.0, 1.0).masked_fill(both, 1.0)


def log_inclusion_probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """log u, float64, finite and at most 0, for cosines within [-1, 1]; `tables` is at least 2.

    While few collisions are expected, u is summed as the binomial tail that it is, from its leading term
    C(tables, 2) r^2 (1 - r)^(tables - 2) taken in logarithms, so that no digits cancel and nothing underflows.
    """
    # arccos(-c) is pi - arccos(c), without the subtraction.
    p = (torch.arccos(-cosine.double()) / math.pi).clamp(_LEAST_P, 1.0)
    log_r = bits * torch.log(p)
    r = torch.exp(log_r)
    log_miss = torch.log1p(-r)
    few = tables * r < _SERIES_BELOW
    odds = torch.where(few, r, 0.0) / torch.where(few, 1.0 - r, 1.0)
    rest = torch.ones_like(r)
    for term in (5, 4, 3):
        rest = 1.0 + (tables + 1 - term) / term * odds * rest
    tail = math.log(tables * (tables - 1) / 2) + 2.0 * log_r + (tables - 2) * torch.where(few, log_miss, 0.0)
    direct = 1.0 - torch.exp(tables * log_miss) - tables * r * torch.exp((tables - 1) * log_miss)
    log_u = torch.where(few, tail + torch.log(rest), torch.log(torch.where(few, 1.0, direct)))
    return log_u.clamp_max(0.0)


def inclusion_probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """u, float64 in (0, 1]: see `log_inclusion_probability`."""
    return torch.exp(log_inclusion_probability(cosine, bits, tables))


def _unit(vectors: Tensor) -> Tensor:
    """Scaled to length 1 in fp32, by the largest element first, so that no square overflows or vanishes."""
    scaled = vectors.float()
    largest = scaled.abs().amax(-1, keepdim=True)
    scaled = scaled / torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(length > 0, length, 1.0)
