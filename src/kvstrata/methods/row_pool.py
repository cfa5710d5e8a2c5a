"""A pool with room for some of the rows: what remains available at all, which is not the question of what is read.

Lee et al. 2024, "InfiniGen", section 4.4: when the pool of host memory is full, a new row takes the place of a victim,
chosen by a counter of uses (theirs), by age, or by time since the last use. A row that is not in the pool cannot be
selected, so the recall of the pool is the ceiling of the recall of any selection from it. Here the pool hides rows from
one method; the store keeps them.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from kvstrata.contract.budget import Fraction
from kvstrata.methods.selection import NO_UNIT

__all__ = ["COUNTER_LIMIT", "PoolPolicy", "RowPool", "pool_recall"]

COUNTER_LIMIT = 255
"""A counter that gets there halves all counters of its head, so that old uses fade."""


class PoolPolicy(StrEnum):
    """The victim: COUNTER, the row that was used least often; FIFO, the oldest; LRU, the one whose last use is longest
    ago, where admission is a use. Of equals the lower position. The row that comes in is never the victim."""

    COUNTER = "counter"
    FIFO = "fifo"
    LRU = "lru"


class RowPool:
    """The rows of a layer that are available, K/V head by K/V head.

    share: of all rows, rounded down. rows: at most so many, or `None`. Room for everything costs nothing.
    """

    def __init__(
        self,
        kv_heads: int,
        policy: PoolPolicy = PoolPolicy.COUNTER,
        share: float = 1.0,
        rows: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.policy = policy
        self.size = 0
        self._share, self._rows = Fraction(share), rows
        self._present = torch.zeros(kv_heads, 0, dtype=torch.bool, device=device)
        self._rank = torch.zeros(kv_heads, 0, dtype=torch.int64, device=device)  # counts, or moments of the last use
        self._moment = 0

    @property
    def bounded(self) -> bool:
        """Whether rows can be evicted."""
        return self._rows is not None or self._share.fraction < 1

    @property
    def capacity(self) -> int:
        """Rows of each K/V head that it holds at most, out of those that it has seen."""
        share = self._share.limit(self.size)
        return share if self._rows is None else min(share, self._rows)

    @property
    def present(self) -> Tensor:
        """bool [kv_heads, size]: rows that can be selected."""
        if self.bounded:
            return self._present
        return torch.ones(self._present.shape[0], self.size, dtype=torch.bool, device=self._present.device)

    @property
    def nbytes(self) -> int:
        """Bytes of its marks and counters."""
        return sum(plane.numel() * plane.element_size() for plane in (self._present, self._rank))

    def admit(self, count: int) -> None:
        """The next `count` rows come in, one after the other; those that no longer fit go."""
        self.size += count
        if not self.bounded or not count:
            return
        self._moment += 1
        rank = self._moment if self.policy is PoolPolicy.LRU else 0
        self._present = torch.nn.functional.pad(self._present, (0, count), value=True)
        self._rank = torch.nn.functional.pad(self._rank, (0, count), value=rank)
        excess = self._present.sum(-1, keepdim=True) - self.capacity
        if bool((excess > 0).any()):
            order = self._rank.masked_fill(~self._present, torch.iinfo(torch.int64).max)
            order[:, -1] = torch.iinfo(torch.int64).max
            victims = torch.sort(order, dim=-1, stable=True).indices
            stays = torch.arange(self.size, device=victims.device) >= excess
            self._present &= torch.zeros_like(self._present).scatter_(1, victims, stays)

    def use(self, rows: Tensor) -> None:
        """Note that `rows` int64 [owners, n] were selected, for K/V heads or query heads as owners."""
        if not self.bounded or self.policy is PoolPolicy.FIFO:
            return
        named = rows.reshape(self._rank.shape[0], -1)
        counts = self._rank.new_zeros(self._rank.shape[0], self.size + 1)
        counts.scatter_add_(1, named % (self.size + 1), torch.ones_like(named))  # NO_UNIT: the column too many
        counts = counts[:, :-1]
        if self.policy is PoolPolicy.LRU:
            self._moment += 1
            self._rank = self._rank.masked_fill(counts > 0, self._moment)
            return
        self._rank = self._rank + counts
        full = self._rank.amax(-1, keepdim=True) >= COUNTER_LIMIT
        self._rank = torch.where(full, self._rank // 2, self._rank)

    def truncate(self, size: int) -> None:
        """Forget the rows from position `size` on. Those that were evicted before do not come back."""
        self.size = min(self.size, size)
        self._present, self._rank = self._present[:, :size].clone(), self._rank[:, :size].clone()


def pool_recall(pool: RowPool, wanted: Tensor) -> Tensor:
    """Share of the rows `wanted` int64 [owners, n] that the pool holds, fp32 [owners]; 1 where none is wanted.

    The owners are K/V heads or query heads. No selection from the pool can have a higher recall of these rows.
    """
    present = pool.present.repeat_interleave(wanted.shape[0] // pool.present.shape[0], dim=0)
    real = wanted != NO_UNIT
    held = present.gather(1, wanted.clamp_min(0)) & real
    return torch.where(real.any(-1), held.sum(-1) / real.sum(-1).clamp_min(1), 1.0)
