"""The index of InfiniGen: some channels of every key, turned into the skewed basis, and the pool of available rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.contract.method import Owner, QueryVariant
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.interface import Index
from kvstrata.methods.row_pool import RowPool
from kvstrata.methods.skewing import PartialBasis, QuerySample, skew

__all__ = ["PartialKeys", "SpeculationRecord"]


@dataclass(frozen=True, slots=True)
class SpeculationRecord:
    """How one choice came about.

    layer: that was chosen for. owner, group: whose lists, and how many query heads share one K/V head. columns:
    generation of the partial columns. alpha: margin below the best score; `None` where a mass was asked for instead.
    uncapped: rows of each owner that passed. equalised: the count for all owners that they made. cap: what was allowed.
    """

    layer: int
    owner: Owner
    group: int
    variant: QueryVariant
    columns: int
    alpha: float | None
    uncapped: tuple[int, ...]
    equalised: int
    cap: int

    def __str__(self) -> str:
        passed = " ".join(map(str, self.uncapped))
        return (
            f"layer {self.layer}, {self.variant} query, {len(self.uncapped)} {self.owner} lists, group {self.group}, "
            f"columns {self.columns}, alpha {self.alpha}, passed {passed}, equalised {self.equalised}, cap {self.cap}"
        )


class PartialKeys(Index):
    """Partial keys [kv_heads, rows, r] of one layer, in the keys' dtype.

    sample: queries of the prefill, before there is a basis. basis: `None` until the index was built. columns: the
    generation in which it was made. pool: rows that can be selected. last: the latest choice, for receipts.
    """

    def __init__(self, sample: QuerySample | None = None) -> None:
        self.sample = sample
        self.basis: PartialBasis | None = None
        self.columns = 0
        self.pool = RowPool(0)
        self.last: SpeculationRecord | None = None
        self._keys = torch.zeros(0, 0, 0)

    def begin(self, basis: PartialBasis, columns: int, pool: RowPool, dtype: torch.dtype) -> None:
        """No rows yet, in `basis`, which is that of generation `columns`."""
        self.sample, self.basis, self.columns, self.pool = None, basis, columns, pool
        heads, _, width = basis.projector.shape
        self._keys = torch.zeros(heads, 0, width, dtype=dtype, device=basis.projector.device)

    @property
    def keys(self) -> Tensor:
        """[kv_heads, frontier, r]."""
        return self._keys[:, : self.frontier]

    @property
    def nbytes(self) -> int:
        """Partial keys, basis, pool, and queries that are still kept."""
        basis = () if self.basis is None else (self.basis.projector, self.basis.columns)
        held = sum(tensor.numel() * tensor.element_size() for tensor in (self._keys, *basis))
        return int(held) + self.pool.nbytes + (0 if self.sample is None else self.sample.nbytes)

    def extend(self, start: int, keys: Tensor) -> None:
        """Take in `keys` [kv_heads, rows, head_dim], after rotary positions, from position `start` on.

        Errors: `RetrievalError` with INDEX_FRONTIER_GAP unless `start` is the frontier.
        """
        if start != self.frontier:
            raise RetrievalError(
                Reason.INDEX_FRONTIER_GAP,
                f"rows from {start} on were appended to partial keys that end at {self.frontier}",
                "build the index again",
                field="index.frontier",
            )
        stop, room = start + keys.shape[1], self._keys.shape[1]
        if stop > room:
            # An eighth more than before, so that appending a row costs a constant time on average.
            self._keys = torch.nn.functional.pad(self._keys, (0, 0, 0, max(stop, room + room // 8) - room))
        self._keys[:, start:stop] = skew(keys, self._projector)
        self.pool.admit(stop - start)
        self.frontier = stop
        self.generation += 1

    def truncate(self, frontier: int) -> None:
        """Forget the rows from position `frontier` on."""
        self.pool.truncate(frontier)
        self.frontier = min(self.frontier, frontier)
        self.generation += 1
        self.last = None

    def scores(self, queries: Tensor) -> Tensor:
        """Partial scores, without the scale, fp32 [query_heads, frontier], of `queries` [query_heads, rows, head_dim].

        Of several query rows the largest.
        """
        partial = skew(queries, self._projector)
        grouped = partial.reshape(self._keys.shape[0], -1, partial.shape[-1]) @ self.keys.float().mT
        return grouped.reshape(queries.shape[0], -1, self.frontier).amax(1)

    @property
    def _projector(self) -> Tensor:
        assert self.basis is not None, "the index was not built"
        return self.basis.projector
