"""What InfLLM keeps for a layer: far keys, units of consecutive rows, their representatives, and evidence in waiting.

Rows [0, first) are the sinks. Unit u is [first + u * size, first + (u + 1) * size); it is settled once the `local` rows
after each of its own are there, and then its representatives are final.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from kvstrata.methods.choosing import top_units
from kvstrata.methods.influence import influence_of_keys, influence_of_queries
from kvstrata.methods.interface import Index
from kvstrata.methods.row_buffer import RowBuffer
from kvstrata.methods.selection import NO_UNIT
from kvstrata.methods.unit_cache import UnitCache

__all__ = ["InfLLMIndex", "RepresentativeRule"]

_PIECE = 512


class RepresentativeRule(StrEnum):
    """Which rows speak for their unit: those with the greatest score.

    QUERIES: mean product of the key with the following queries, as many as there are recent rows (the paper).
    WEIGHTS: sum of the softmax weights that they got while they were recent, normalised over recent and far rows
    jointly (the authors' code). KEYS: mean product with the keys of the unit; ours, for histories whose queries are
    gone.
    """

    QUERIES = "queries"
    WEIGHTS = "weights"
    KEYS = "keys"


class InfLLMIndex(Index):
    """first: sinks. local: recent rows of each query. size: rows of a unit. representatives: of them, for each of
    `heads` (K/V heads or query heads). keep_keys: keys of settled units are needed later.

    Attributes: keys: far keys, before rotary positions or as they are. unit_keys: fp32 [heads, units, head_dim], mean
    of the representatives' keys. members: int64 [heads, units, representatives], their positions, ascending. queries:
    fp32, those that later settle units. pending: fp32 [heads, rows], weights of the rows that are in no settled unit;
    weighed: queries before it have given theirs. open: settled units that the latest step could choose. stop: first
    recent row of the latest step; no unit reaches beyond. far_queries: of the latest step. caches: one per owner.
    """

    def __init__(
        self,
        rule: RepresentativeRule,
        first: int,
        local: int,
        size: int,
        representatives: int,
        heads: int,
        keep_keys: bool,
    ) -> None:
        self.rule = rule
        self.first, self.local = first, local
        self.size, self.representatives = size, representatives
        self.heads, self.keep_keys = heads, keep_keys
        self.keys, self.queries = RowBuffer(0), RowBuffer(0)
        self.unit_keys: Tensor | None = None
        self.members: Tensor | None = None
        self.pending: Tensor | None = None
        self.weighed = 0
        self.open = 0
        self.stop = 0
        self.far_queries: Tensor | None = None
        self.caches: list[UnitCache] = []

    @property
    def units(self) -> int:
        """Settled units."""
        return 0 if self.members is None else self.members.shape[1]

    @property
    def end(self) -> int:
        """Position after the last settled unit."""
        return self.first + self.units * self.size

    @property
    def nbytes(self) -> int:
        """All tensors, far keys included: they double what the store holds."""
        return super().nbytes + self.keys.nbytes + self.queries.nbytes

    @property
    def last(self) -> str | None:
        """The unit caches' account so far, for the receipt; `None` before the first choice."""
        if not self.caches:
            return None
        hits = sum(cache.hits for cache in self.caches)
        misses = sum(cache.misses for cache in self.caches)
        evictions = sum(cache.evictions for cache in self.caches)
        resident = sum(len(cache.resident) for cache in self.caches)
        return f"unit cache: {hits} hits, {misses} misses, {evictions} evictions, {resident} units worth keeping"

    def rows_of(self, units: Tensor) -> Tensor:
        """Positions [owners, n * size] of the members of `units` [owners, n]."""
        within = torch.arange(self.size, device=units.device)
        rows = self.first + units.unsqueeze(-1) * self.size + within
        return rows.masked_fill((units.unsqueeze(-1) == NO_UNIT) | (rows >= self.stop), NO_UNIT).flatten(1)

    def keys_of(self, rows: Tensor) -> Tensor:
        """Far keys [heads, n, head_dim] of `rows` [owners, n]; heads are query heads where the owners are, else K/V
        heads. Any row stands for `NO_UNIT`."""
        keys, rows = self.keys.rows, rows.clamp_min(0)
        if rows.shape[0] == 1:
            return keys.index_select(1, rows[0])
        heads = torch.arange(rows.shape[0], device=rows.device) // (rows.shape[0] // keys.shape[0])
        return keys[heads.unsqueeze(-1), rows]

    def take(self, keys: Tensor, queries: Tensor | None) -> None:
        """Rows that follow the frontier: far keys [kv_heads, n, head_dim] and, for QUERIES, far queries
        [query_heads, n, head_dim] at their own positions or at none."""
        for start in range(0, keys.shape[1], _PIECE):
            piece = slice(start, start + _PIECE)
            self.keys.append(keys[:, piece])
            if self.rule is RepresentativeRule.QUERIES:
                assert queries is not None
                self.queries.append(self._of_heads(queries[:, piece].float()))
            self.frontier = self.stop = self.keys.stop
            if self.rule is not RepresentativeRule.WEIGHTS:
                self.settle(self.frontier)
        self.generation += 1

    def weigh(self, weights: Tensor, start: int, queries: int) -> None:
        """Weights [query_heads, n] that rows from `start` on got from the queries before position `queries`."""
        waiting = weights.new_zeros(self.heads, max(0, self.frontier - self.end))
        if self.pending is not None:
            waiting[:, : self.pending.shape[1]] = self.pending
        skip = max(0, self.end - start)
        got = self._of_heads(weights[:, skip:])
        begin = max(0, start - self.end)
        waiting[:, begin : begin + got.shape[1]] += got
        self.pending, self.weighed = waiting, queries
        self.settle(queries)

    def settle(self, evidence: int) -> None:
        """Fix the representatives of units whose rows have all their evidence before position `evidence`."""
        count, start = (evidence - self.local - self.end) // self.size, self.end
        if count <= 0:
            return
        stop = start + count * self.size
        keys = self.keys.read(start, stop)
        if self.rule is RepresentativeRule.QUERIES:
            influence = influence_of_queries(self.queries.read(start + 1, stop + self.local), keys, self.local)
        elif self.rule is RepresentativeRule.KEYS:
            influence = influence_of_keys(keys.unflatten(1, (count, self.size)))
        else:
            assert self.pending is not None
            influence, self.pending = self.pending[:, : stop - start], self.pending[:, stop - start :].clone()
        each = self.heads // keys.shape[0]
        if influence.shape[0] != self.heads:
            influence = influence.repeat_interleave(each, dim=0)
        best = top_units(influence.reshape(-1, self.size), self.representatives)
        within = best.view(self.heads, count, -1).sort(-1).values
        chosen = within + self.size * torch.arange(count, device=keys.device).view(1, -1, 1)
        places = chosen.flatten(1).unsqueeze(-1).expand(-1, -1, keys.shape[-1])
        picked = keys.repeat_interleave(each, dim=0).gather(1, places)
        means = picked.unflatten(1, (count, -1)).float().mean(2)
        members = start + chosen
        self.unit_keys = means if self.unit_keys is None else torch.cat((self.unit_keys, means), dim=1)
        self.members = members if self.members is None else torch.cat((self.members, members), dim=1)
        # What may be taken back later needs its evidence again.
        self.queries.drop_before(self.end - self.local)
        if not self.keep_keys:
            self.keys.drop_before(self.end - self.local)

    def truncate(self, frontier: int) -> bool:
        """Go back to rows [0, frontier). False, and of no use any more, when evidence that this takes is gone."""
        units = min(self.units, max(0, frontier - self.local - self.first) // self.size)
        end = self.first + units * self.size
        kept = [self.keys, *([self.queries] if self.rule is RepresentativeRule.QUERIES else [])]
        if self.rule is RepresentativeRule.WEIGHTS or any(buffer.start > min(end, frontier) for buffer in kept):
            return False
        for buffer in kept:
            buffer.truncate(frontier)
        if self.members is not None and self.unit_keys is not None:
            self.members, self.unit_keys = self.members[:, :units].clone(), self.unit_keys[:, :units].clone()
        for cache in self.caches:
            cache.forget(units)
        self.frontier = self.stop = frontier
        self.open = min(self.open, units)
        self.far_queries = None
        self.generation += 1
        return True

    def _of_heads(self, values: Tensor) -> Tensor:
        """[query_heads, ...] to those that have representatives: the mean of each group, or themselves."""
        return values if values.shape[0] == self.heads else values.unflatten(0, (self.heads, -1)).mean(1)
