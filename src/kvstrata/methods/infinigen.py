"""InfiniGen: rows chosen a layer ahead, by a rehearsal of the scores in a few channels.

Lee et al. 2024, "InfiniGen: Efficient generative inference of large language models with dynamic KV cache management",
OSDI, section 4. The residual stream changes little from one layer to the next, so that what enters layer l - 1 makes,
through the projection of layer l, a query close to the one that will come. Its scores against partial keys (`skewing`)
name the rows within alpha of the best; each head then reads equally many, up to a cap. Attention itself is over full
keys and values. The paper has one query head for each K/V head; how a group shares one list is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from kvstrata.contract.budget import EstimatedMass, Fraction, Threshold
from kvstrata.contract.method import AnswerClass, GroupSharing, MethodContract, Owner, QueryVariant, Unit, UpdatePhase
from kvstrata.errors import ConfigurationError, Reason, StateError
from kvstrata.methods.choosing import scores_of, share_scores, top_units
from kvstrata.methods.equalised_counts import (
    Comparison,
    CountRule,
    ThresholdBest,
    equalise,
    mass_counts,
    threshold_counts,
)
from kvstrata.methods.interface import Method, MethodContext, StepRows, require_at_least, require_member
from kvstrata.methods.partial_keys import PartialKeys, SpeculationRecord
from kvstrata.methods.row_pool import PoolPolicy, RowPool
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.methods.skewing import (
    ColumnRule,
    PartialBasis,
    QuerySample,
    column_energy,
    shared_columns,
    skew,
    skew_basis,
)

__all__ = ["InfiniGen", "InfiniGenFromKeys", "SpeculationNorm"]

_BUILD_ROWS = 8192  # rows that are read at once when an index is built

_SHARINGS = (GroupSharing.SEPARATE, GroupSharing.MAX, GroupSharing.MEAN, GroupSharing.SOFTMAX_SUM)


class SpeculationNorm(StrEnum):
    """The norm on what enters layer l - 1, before the projection of layer l. SOURCE: that of layer l - 1, whose
    attention input the paper takes. TARGET: that of layer l, which the projection was trained with."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True)
class InfiniGen(Method[PartialKeys]):
    """Rows whose partial score is high, predicted from the layer before.

    alpha: how far below the best score, after the scale, a row passes; the paper takes 4 or 5 by model, infinity leaves
    the choice to the cap. cap_share, cap_rows: rows that may be chosen beside the persistent ones, as a share of the
    history (0.2 in the paper's evaluation) or, where given, a number; they hold under a budget of rows or a fraction.
    `Threshold` brings its own margin and cap, `EstimatedMass` a mass and a cap, in their place. partial_ratio: share of
    the channels that is kept. sample_rows: rows of the prefill at most that make basis and columns. sharing: MAX, MEAN
    and SOFTMAX_SUM make one list for the query heads of a K/V head, from scores taken from each head's best, since a
    softmax does not see what is added to all scores of a head: MAX so reads what any of them would pass. pool_share,
    pool_rows, pool_policy: see `RowPool`. columns, comparison, count, best, norm: see there.
    """

    contract: ClassVar[MethodContract] = MethodContract(
        name="infinigen",
        source="Lee et al. 2024, InfiniGen, section 4",
        version=1,
        answer=AnswerClass.APPROXIMATE,
        unit=Unit.ROW,
        representation="some channels of each key in a basis of the prefill's queries",
        index="a list of rows",
        owner=Owner.KV_HEAD,
        sharing=GroupSharing.MAX,
        update=UpdatePhase.ROW,
        variant=QueryVariant.PREDICTED,
        append_equals_build=False,
        rebuilds=False,
        needs_hidden=True,
        all_rows="equals exact attention, with alpha and cap_share that pass every row",
    )

    alpha: float = 5.0
    cap_share: float = 0.2
    cap_rows: int | None = None
    partial_ratio: float = 0.3
    sample_rows: int = 1024
    sharing: GroupSharing = GroupSharing.MAX
    columns: ColumnRule = ColumnRule.SUM
    comparison: Comparison = Comparison.AT_LEAST
    count: CountRule = CountRule.MEAN
    best: ThresholdBest = ThresholdBest.OWN
    norm: SpeculationNorm = SpeculationNorm.SOURCE
    pool_share: float = 1.0
    pool_rows: int | None = None
    pool_policy: PoolPolicy = PoolPolicy.COUNTER
    dense_layers: int = 2

    def __post_init__(self) -> None:
        if not _is_number(self.alpha) or not self.alpha >= 0:
            raise _invalid("alpha", self.alpha, "a number of at least 0")
        for share in ("cap_share", "partial_ratio", "pool_share"):
            if not _is_number(getattr(self, share)) or not 0 < getattr(self, share) <= 1:
                raise _invalid(share, getattr(self, share), "more than 0 and at most 1")
        for count, least in (("cap_rows", 1), ("pool_rows", 1), ("sample_rows", 1), ("dense_layers", 0)):
            if getattr(self, count) is not None:
                require_at_least(f"InfiniGen.{count}", getattr(self, count), least)
        # A sum over the group is a mean with a larger alpha; that of the queries rehearses no head's scores.
        require_member("InfiniGen.sharing", self.sharing, _SHARINGS)
        require_member("InfiniGen.columns", self.columns, tuple(ColumnRule))
        require_member("InfiniGen.comparison", self.comparison, tuple(Comparison))
        require_member("InfiniGen.count", self.count, tuple(CountRule))
        require_member("InfiniGen.best", self.best, tuple(ThresholdBest))
        require_member("InfiniGen.norm", self.norm, tuple(SpeculationNorm))
        require_member("InfiniGen.pool_policy", self.pool_policy, tuple(PoolPolicy))

    @property
    def owner(self) -> Owner:
        """K/V heads, or query heads where these do not share."""
        return Owner.QUERY_HEAD if self.sharing is GroupSharing.SEPARATE else Owner.KV_HEAD

    def observe(self, ctx: MethodContext, layer: int, index: PartialKeys | None, rows: StepRows) -> PartialKeys | None:
        """Keeps a sample of the queries until there is a basis; one that was made stays."""
        index = PartialKeys(QuerySample(self.sample_rows)) if index is None else index
        if index.sample is not None:
            index.sample.add(rows.start, rows.queries)
        return index

    def build(self, ctx: MethodContext, layer: int, index: PartialKeys | None) -> PartialKeys:
        """Reads every key once. Errors: `StateError` where no queries were observed."""
        built = PartialKeys()
        if index is not None and index.basis is not None:
            basis, columns, built.generation = index.basis, index.columns, index.generation
        else:
            basis, columns = self._make_basis(ctx, layer, index), 1
        for start in range(0, ctx.visible, _BUILD_ROWS):
            keys = ctx.keys(layer, start, min(start + _BUILD_ROWS, ctx.visible))
            if start == 0:
                pool = RowPool(keys.shape[0], self.pool_policy, self.pool_share, self.pool_rows, keys.device)
                built.begin(basis, columns, pool, keys.dtype)
            built.extend(start, keys)
        return built

    def append(self, ctx: MethodContext, layer: int, index: PartialKeys, rows: StepRows) -> PartialKeys:
        """The same index, changed in place. Errors: `RetrievalError` unless the rows continue it."""
        index.extend(rows.start, rows.keys)
        return index

    def truncate(self, index: PartialKeys, frontier: int) -> PartialKeys | None:
        """Basis and columns stay, also where rows that made them were taken back: any basis is legal."""
        if frontier < 1:
            return None
        index.truncate(frontier)
        return index

    def speculate(self, ctx: MethodContext, layer: int, index: PartialKeys, hidden: Tensor) -> Selection | None:
        """Scores the query that `hidden`, on its way into the layer before, would make in `layer`."""
        if ctx.view is None:
            return None
        normed = ctx.view.input_norm(layer if self.norm is SpeculationNorm.TARGET else layer - 1, hidden)
        queries, _, _ = ctx.view.project(layer, normed)
        positions = torch.arange(ctx.visible - hidden.shape[0], ctx.visible, device=hidden.device)
        return self._choose(ctx, layer, index, ctx.view.rotate(layer, queries, positions), QueryVariant.PREDICTED)

    def select(self, ctx: MethodContext, layer: int, index: PartialKeys, rows: StepRows) -> Selection:
        """Scores the actual query: where nothing was predicted, and where a prediction is not enough."""
        return self._choose(ctx, layer, index, rows.queries, QueryVariant.ACTUAL)

    def _query_sample(self, ctx: MethodContext, layer: int, index: PartialKeys | None) -> tuple[Tensor, Tensor]:
        """Sampled queries [query_heads, rows, head_dim] and their positions int64 [rows]."""
        if index is None or index.sample is None:
            raise StateError(
                Reason.NOT_COMMITTED,
                f"no queries of layer {layer} were observed",
                "let the method observe a prefill, or use InfiniGenFromKeys",
            )
        return index.sample.queries, index.sample.positions

    def _make_basis(self, ctx: MethodContext, layer: int, index: PartialKeys | None) -> PartialBasis:
        heads = ctx.geometry.kv_heads
        queries, positions = self._query_sample(ctx, layer, index)
        keys = ctx.keys_at(layer, positions.expand(heads, -1))
        basis = skew_basis(queries, heads)
        count = max(1, int(self.partial_ratio * basis.shape[1]))
        query_energy, key_energy = (column_energy(skew(states, basis), heads) for states in (queries, keys))
        return PartialBasis.of(basis, shared_columns(query_energy, key_energy, count, self.columns))

    def _choose(
        self, ctx: MethodContext, layer: int, index: PartialKeys, queries: Tensor, variant: QueryVariant
    ) -> Selection:
        budget, group = ctx.budget, ctx.geometry.group
        scores = index.scores(queries) * ctx.geometry.scale
        if not scores.shape[-1]:
            return Selection.none(self.owner, ctx.geometry.owners(self.owner), scores.device)
        first, stop = ctx.region
        offered = torch.zeros_like(scores[0], dtype=torch.bool)
        offered[first:stop] = True
        relative = scores - scores.amax(-1, keepdim=True) if self.best is ThresholdBest.OWN else scores
        shared = share_scores(relative, self.sharing, group)
        present = index.pool.present
        allowed = offered & present.repeat_interleave(shared.shape[0] // present.shape[0], dim=0)

        if isinstance(budget, EstimatedMass):
            alpha, passed = None, mass_counts(scores, shared, allowed, offered, budget.mass)
        else:
            alpha = budget.margin if isinstance(budget, Threshold) else float(self.alpha)
            passed = threshold_counts(shared, allowed, alpha, self.comparison, self.best)
        uncapped = tuple(passed.tolist())
        equalised = equalise(uncapped, self.count)
        cap = ctx.allowance if isinstance(budget, Threshold | EstimatedMass) else min(ctx.allowance, self._cap(ctx))

        units = top_units(shared.masked_fill(~allowed, -torch.inf), min(equalised, cap))
        index.pool.use(units)
        index.last = SpeculationRecord(
            layer, self.owner, group, variant, index.columns, alpha, uncapped, equalised, cap
        )
        return Selection(
            self.owner,
            units,
            candidates=int(allowed.sum(-1).max()),
            variant=variant,
            estimate=_omitted(scores, offered, units),
            capped=equalised > cap,
            scores=scores_of(scores, units),
        )

    def _cap(self, ctx: MethodContext) -> int:
        return Fraction(self.cap_share).limit(ctx.visible) if self.cap_rows is None else self.cap_rows


@dataclass(frozen=True)
class InfiniGenFromKeys(InfiniGen):
    """InfiniGen with a basis from keys in place of queries: for histories that were restored without a prefill.

    Not in the paper. Keys leave the directions out of account in which queries vary, so that the partial scores miss
    more than with a basis of queries.
    """

    contract: ClassVar[MethodContract] = replace(
        InfiniGen.contract,
        name="infinigen_keys",
        representation="some channels of each key in a basis of sampled keys",
        rebuilds=True,
    )

    def observe(self, ctx: MethodContext, layer: int, index: PartialKeys | None, rows: StepRows) -> PartialKeys | None:
        """Needs no evidence."""
        return index

    def _query_sample(self, ctx: MethodContext, layer: int, index: PartialKeys | None) -> tuple[Tensor, Tensor]:
        heads, stride = ctx.geometry.kv_heads, 1
        while -(-ctx.visible // stride) > self.sample_rows:
            stride *= 2
        device = ctx.keys(layer, 0, 1).device
        positions = torch.arange(0, ctx.visible, stride, device=device)
        return ctx.keys_at(layer, positions.expand(heads, -1)), positions


def _omitted(scores: Tensor, offered: Tensor, units: Tensor) -> Tensor:
    """Share of exp(score), fp32 [query_heads], in rows that were offered and not chosen, hidden ones included."""
    rows = scores.shape[-1]
    taken = torch.zeros(units.shape[0], rows + 1, dtype=torch.bool, device=units.device)
    taken.scatter_(1, torch.where(units == NO_UNIT, rows, units), True)
    taken = taken[:, :-1].repeat_interleave(scores.shape[0] // units.shape[0], dim=0)
    left = scores.masked_fill(taken | ~offered, -torch.inf).logsumexp(-1)
    return torch.exp(left - scores.logsumexp(-1)).clamp(0, 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"InfiniGen.{field} must be {wanted}, got {value!r}")
