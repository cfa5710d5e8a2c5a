"""InfLLM: units of consecutive rows, found through a few representative keys each, attended at one common distance.

Xiao et al. 2024, "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory"
(arXiv:2402.04617), section 3. Rows outside the window of recent rows enter attention as if all of them stood at its
edge, so that no distance is longer than the model was trained for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvstrata.contract.method import AnswerClass, GroupSharing, MethodContract, Owner, QueryVariant, Unit, UpdatePhase
from kvstrata.errors import ConfigurationError, Reason, StateError, UnsupportedError
from kvstrata.methods.choosing import Chosen, choose, share_scores
from kvstrata.methods.infllm_index import InfLLMIndex, RepresentativeRule
from kvstrata.methods.infllm_weights import weigh_all, weigh_chosen
from kvstrata.methods.interface import Method, MethodContext, StepRows, require_positive, require_unit_rows
from kvstrata.methods.selection import NO_UNIT, Repositioned, Selection
from kvstrata.methods.unit_cache import UnitCache, UnitCachePolicy

__all__ = ["InfLLM"]


@dataclass(frozen=True)
class InfLLM(Method[InfLLMIndex]):
    """The sinks are the initial rows of the paper, the recent rows its local window.

    block_size: rows of a unit. representatives: of each unit. top_k: units of one selection beside the unfinished one;
    `None` for as many as the budget allows. rule: how representatives are found. per_query_head: each query head has
    its own (the authors' code), else each K/V head. selection_owner: LAYER for one selection for all heads, KV_HEAD or
    QUERY_HEAD (the code's `perhead`) for one each. reposition: whether far rows move to a common distance; it takes
    keys before rotary positions, and a copy of all of them. cache_units, cache_policy, cache_decay: of the unit cache.

    Errors: `ConfigurationError` naming the field.
    """

    contract: ClassVar[MethodContract] = MethodContract(
        name="infllm",
        source="InfLLM (Xiao et al. 2024, arXiv:2402.04617), section 3",
        version=1,
        answer=AnswerClass.APPROXIMATE,
        unit=Unit.BLOCK,
        representation="mean of a unit's representative keys, and all keys before rotary positions",
        index="flat list of units",
        owner=Owner.LAYER,
        sharing=GroupSharing.SUM,
        update=UpdatePhase.ROW,
        variant=QueryVariant.REPOSITIONED,
        append_equals_build=False,
        rebuilds=False,
        selects_in_prefill=True,
        needs_hidden=True,
        all_rows="every row enters, all but recent ones at one distance; without `reposition` equals exact attention",
        workload="histories longer than the model was trained for",
    )

    block_size: int = 128
    representatives: int = 4
    top_k: int | None = None
    rule: RepresentativeRule = RepresentativeRule.QUERIES
    per_query_head: bool = False
    selection_owner: Owner = Owner.LAYER
    reposition: bool = True
    cache_units: int = 32
    cache_policy: UnitCachePolicy = UnitCachePolicy.SCORE
    cache_decay: float = 0.1

    def __post_init__(self) -> None:
        require_unit_rows("InfLLM.block_size", self.block_size)
        require_positive("InfLLM.representatives", self.representatives)
        if self.top_k is not None:
            require_positive("InfLLM.top_k", self.top_k)
        if self.representatives > self.block_size:
            raise _invalid("representatives", self.representatives, f"at most block_size={self.block_size}")
        for field, kind in (
            ("rule", RepresentativeRule),
            ("selection_owner", Owner),
            ("cache_policy", UnitCachePolicy),
        ):
            if not isinstance(getattr(self, field), kind):
                raise _invalid(field, getattr(self, field), f"a {kind.__name__}")
        UnitCache(self.cache_units, self.cache_policy, self.cache_decay)

    @property
    def owner(self) -> Owner:
        """`selection_owner`."""
        return self.selection_owner

    def observe(self, ctx: MethodContext, layer: int, index: InfLLMIndex | None, rows: StepRows) -> InfLLMIndex | None:
        """Begins with the first row of a history, or never: keys before rotary positions cannot be had later."""
        if index is not None and index.frontier > rows.start and not index.truncate(rows.start):
            index = None
        if index is None and rows.start == 0:
            index = self._empty(ctx)
        if index is None or index.frontier != rows.start:
            return None
        self._take(ctx, layer, index, rows)
        if self.rule is RepresentativeRule.WEIGHTS:
            weigh_all(ctx, layer, index, rows)
        return index

    def build(self, ctx: MethodContext, layer: int, index: InfLLMIndex | None) -> InfLLMIndex:
        """What `observe` has made. Errors: `StateError` when it has not seen all rows."""
        if index is None or index.frontier != ctx.visible:
            seen = 0 if index is None else index.frontier
            raise StateError(
                Reason.NOT_COMMITTED,
                f"InfLLM saw the computation of {seen} rows of {ctx.visible} in layer {layer}",
                "read the history anew, or use InfLLMFromKeys, which needs the stored keys alone",
            )
        return index

    def append(self, ctx: MethodContext, layer: int, index: InfLLMIndex, rows: StepRows) -> InfLLMIndex:
        """See `Method.append`. Changes `index` and returns it."""
        if index.frontier != rows.start:
            raise StateError(
                Reason.STALE_FRONTIER, f"rows from {rows.start} on follow an index of {index.frontier} rows"
            )
        self._take(ctx, layer, index, rows)
        if self.rule is RepresentativeRule.WEIGHTS and ctx.budget.limit(ctx.visible) >= ctx.visible:
            # Nobody selects where the budget covers everything.
            weigh_all(ctx, layer, index, rows)
        return index

    def truncate(self, index: InfLLMIndex, frontier: int) -> InfLLMIndex | None:
        """The index over rows [0, frontier). `None` under WEIGHTS, and when more than about the recent rows go."""
        return index if index.truncate(frontier) else None

    def select(self, ctx: MethodContext, layer: int, index: InfLLMIndex, rows: StepRows) -> Selection:
        """The unfinished unit, and the best of those that end before the recent rows of the step's first query.

        One choice for all queries of the step, from the mean of them. Nothing where the unfinished unit has no room.
        """
        sinks, recent = ctx.persistent.bounds(rows.start + 1)
        index.stop = recent
        index.open = min(index.units, max(0, recent - index.first) // self.block_size)
        rest = max(0, recent - index.first - index.open * self.block_size)
        owners = ctx.geometry.owners(self.owner)
        query = self._far_queries(layer, index, ctx, rows) if self.reposition else rows.queries
        units = query.new_full((owners, 0), NO_UNIT, dtype=torch.int64)
        capped = False
        if rest <= ctx.allowance:
            chosen = self._choose(ctx, index, query, ctx.allowance - rest)
            units, capped = chosen.units[:, : self.top_k], chosen.capped
            if rest:
                units = torch.cat((units.new_full((owners, 1), index.open), units), dim=1)
        wanted = index.rows_of(units)
        leaving = max(recent, rows.stop - ctx.persistent.recent)
        selection = Selection(self.owner, units, index.open, capped=capped)
        if not index.keep_keys:
            return selection
        far, sink_keys = index.keys_of(wanted), index.keys.read(0, sinks)
        leaving_keys = index.keys.read(recent, leaving)
        if self.rule is RepresentativeRule.WEIGHTS and index.weighed < rows.stop:
            weigh_chosen(ctx, layer, index, rows, query, wanted, (sink_keys, far, leaving_keys))
        if not self.reposition:
            return selection
        turned = Repositioned(query, far, sink_keys, leaving_keys if leaving > recent else None)
        return replace(selection, variant=QueryVariant.REPOSITIONED, repositioned=turned)

    def rows_of(self, index: InfLLMIndex, units: Tensor) -> Tensor:
        """See `Method.rows_of`; up to the recent rows of the latest step's first query."""
        return index.rows_of(units)

    def unit_span(self, index: InfLLMIndex) -> tuple[int, int, int]:
        """See `Method.unit_span`: the distant rows, those of the unit that is not full yet included."""
        return -(-max(0, index.stop - index.first) // index.size), index.first, max(index.first, index.stop)

    def feedback(self, ctx: MethodContext, layer: int, index: InfLLMIndex, selection: Selection, mass: Tensor) -> None:
        """Lets the unit caches know."""
        units = selection.units.tolist()
        if not index.caches:
            index.caches = [UnitCache(self.cache_units, self.cache_policy, self.cache_decay) for _ in units]
        summed = mass.unflatten(0, (len(units), -1)).sum(1).tolist()
        for cache, chosen, got in zip(index.caches, units, summed, strict=True):
            finished = [(unit, value) for unit, value in zip(chosen, got, strict=True) if 0 <= unit < index.open]
            cache.take([unit for unit, _ in finished], [value for _, value in finished])

    def _empty(self, ctx: MethodContext) -> InfLLMIndex:
        return InfLLMIndex(
            self.rule,
            ctx.persistent.sinks,
            ctx.persistent.recent,
            self.block_size,
            self.representatives,
            ctx.geometry.query_heads if self.per_query_head else ctx.geometry.kv_heads,
            keep_keys=self.reposition or self.rule is RepresentativeRule.WEIGHTS,
        )

    def _take(self, ctx: MethodContext, layer: int, index: InfLLMIndex, rows: StepRows) -> None:
        queries, keys = rows.queries, rows.keys
        if self.reposition:
            view = ctx.view
            if view is None:
                raise UnsupportedError(
                    Reason.OPERATION_UNSUPPORTED,
                    "keys before rotary positions need a live model",
                    "pass reposition=False",
                )
            queries, keys, _ = view.project(layer, view.input_norm(layer, ctx.hidden(layer)))
            index.far_queries = queries
        index.take(keys, queries)

    def _far_queries(self, layer: int, index: InfLLMIndex, ctx: MethodContext, rows: StepRows) -> Tensor:
        assert ctx.view is not None
        assert index.far_queries is not None, "the step's rows were not appended"
        edge = torch.full((rows.queries.shape[1],), index.local - 1, dtype=torch.int64, device=rows.queries.device)
        return ctx.view.rotate(layer, index.far_queries, edge)

    def _choose(self, ctx: MethodContext, index: InfLLMIndex, query: Tensor, allowance: int) -> Chosen:
        geometry = ctx.geometry
        if index.unit_keys is None or index.open == 0:
            return Chosen(query.new_full((geometry.owners(self.owner), 0), NO_UNIT, dtype=torch.int64), False)
        keys = index.unit_keys[:, : index.open]
        grouped = query.float().mean(1).unflatten(0, (keys.shape[0], -1))
        scores = (grouped @ keys.transpose(-1, -2)).flatten(0, 1)
        if self.owner is not Owner.QUERY_HEAD:
            group = geometry.group if self.owner is Owner.KV_HEAD else geometry.query_heads
            scores = share_scores(scores, GroupSharing.SUM, group)
        scores = torch.where(scores.isfinite(), scores, torch.finfo(torch.float32).min)
        heads = geometry.query_heads // scores.shape[0]
        sizes = torch.full((index.open,), self.block_size, dtype=torch.int64, device=scores.device)
        return choose(scores, sizes, ctx.budget, allowance, scores * (geometry.scale / heads))


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"InfLLM.{field} must be {wanted}, got {value!r}")
