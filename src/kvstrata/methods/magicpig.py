"""MagicPIG: a weighted sample of rows in place of the best ones.

Chen et al. 2024, "MagicPIG: LSH sampling for efficient LLM generation", sections 4 and 5. Keys are centred and hashed
into tables; a query samples every row whose code equals its own in at least two tables. A sampled row's score gets
-log u, where u is the probability with which such a row is sampled, and the softmax over static and sampled rows is a
self-normalised importance-sampling estimate of attention over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from kvstrata.contract.budget import EstimatedMass, SelectionBudget, Threshold
from kvstrata.contract.method import AnswerClass, ComputeSite, GroupSharing, MethodContract, Owner, Unit, UpdatePhase
from kvstrata.errors import ConfigurationError, Reason, RetrievalError, UnsupportedError
from kvstrata.methods.hash_tables import HashTables, Projectors, ProjectorScope
from kvstrata.methods.interface import Geometry, Method, MethodContext, StepRows, require_positive
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.methods.simhash import (
    MAX_BITS,
    ROWS_PER_PASS,
    collision_counts,
    cosines,
    log_inclusion_probability,
    simhash,
)
from kvstrata.ports import ModelView

__all__ = ["COLLISIONS", "NOT_SAMPLED", "InverseWeight", "MagicPIG"]

NOT_SAMPLED = -1e30
"""Log-bias of a row that another query head of the group sampled: finite, and a weight of exactly zero."""

COLLISIONS = 2
"""Tables that must agree; the inclusion probability is that of this rule and no other."""

MAX_TABLES = 4096
"""More than any use has; keeps a typing error from filling the memory."""

CODE_EPSILON = 1e-4
"""What the authors' code adds to u."""


class InverseWeight(StrEnum):
    """What is subtracted from a sampled row's score. PAPER: log u. CODE: log(u + 1e-4), as the authors' code has it:
    rows that were sampled against long odds weigh less than they should."""

    PAPER = "paper"
    CODE = "code"


@dataclass(frozen=True)
class MagicPIG(Method[HashTables]):
    """Rows sampled by hash collisions, weighted by the inverse of their inclusion probability.

    bits, tables: planes of a table and tables, the paper's K and L. owner: QUERY_HEAD lists what each query head
    sampled. KV_HEAD lists what any query head of the group sampled, to be read once; each head still weighs its own
    sample alone, so that the answer is the same. dense_layers: layers that attend to everything, as in the authors'
    server; those that a model does not have are passed over.

    A sample's size is random. `Rows` and `Fraction` cap it; `magicpig_tuning.tuned_to` finds bits and tables for an
    expected size. Planes, and what stays of a sample that is cut, follow from the policy's seed.
    """

    contract: ClassVar[MethodContract] = MethodContract(
        name="magicpig",
        source="Chen et al. 2024, MagicPIG: LSH sampling for efficient LLM generation, sections 4 and 5",
        version=1,
        answer=AnswerClass.ESTIMATOR,
        unit=Unit.ROW,
        representation="SimHash codes of centred keys",
        index="tables of codes; rows that agree with the query in at least two",
        owner=Owner.QUERY_HEAD,
        sharing=GroupSharing.SEPARATE,
        update=UpdatePhase.ROW,
        site=ComputeSite.NEAR_DATA,
        append_equals_build=False,
        all_rows="still a sample, but never cut; equals exact attention in the limit of many tables",
    )

    bits: int = 10
    tables: int = 150
    owner: Owner = Owner.QUERY_HEAD
    projectors: ProjectorScope = ProjectorScope.MODEL
    weight: InverseWeight = InverseWeight.PAPER
    dense_layers: tuple[int, ...] = (0, 16, 32, 48, 64)

    def __post_init__(self) -> None:
        require_positive("MagicPIG.bits", self.bits)
        require_positive("MagicPIG.tables", self.tables)
        if self.bits > MAX_BITS:
            raise _invalid("bits", self.bits, f"at most {MAX_BITS}")
        if not COLLISIONS <= self.tables <= MAX_TABLES:
            raise _invalid("tables", self.tables, f"{COLLISIONS} to {MAX_TABLES}, as a row must collide in two")
        if self.owner not in (Owner.QUERY_HEAD, Owner.KV_HEAD):
            raise _invalid("owner", self.owner, "Owner.QUERY_HEAD or Owner.KV_HEAD")
        for field, kind in (("projectors", ProjectorScope), ("weight", InverseWeight)):
            if not isinstance(getattr(self, field), kind):
                raise _invalid(field, getattr(self, field), f"a {kind.__name__}")
        layers: object = self.dense_layers
        if not isinstance(layers, tuple) or not all(type(layer) is int and layer >= 0 for layer in layers):
            raise _invalid("dense_layers", layers, "a tuple of layer numbers")

    def require_budget(self, budget: SelectionBudget) -> None:
        """A sample has no ranking that a threshold or a mass could cut."""
        _require_cap(budget)

    def prepare(self, view: ModelView | None, geometry: Geometry) -> Projectors:
        """Where the planes of all sequences are kept once they are drawn."""
        return Projectors()

    def build(self, ctx: MethodContext, layer: int, index: HashTables | None) -> HashTables:
        """Hash all rows, around the mean of those that a sample may be drawn from; of all where these are none."""
        _require_cap(ctx.budget)
        keys = ctx.keys(layer, 0, ctx.visible)
        first, stop = ctx.region
        middle = keys[:, first:stop] if first < stop else keys
        total = torch.stack([part.double().sum(1) for part in middle.split(ROWS_PER_PASS, dim=1)]).sum(0)
        centre = (total / middle.shape[1]).float()
        shared = ctx.basis if isinstance(ctx.basis, Projectors) else Projectors()
        planes = shared.of(ctx, layer, self.projectors, self.tables * self.bits, keys.device)
        built = HashTables(centre, planes, self.tables, 0 if index is None else index.generation)
        built.extend(keys)
        return built

    def append(self, ctx: MethodContext, layer: int, index: HashTables, rows: StepRows) -> HashTables:
        """Hash the step's rows around the same centre. Errors: `RetrievalError` with INDEX_FRONTIER_GAP."""
        if rows.start != index.frontier:
            raise _gap(f"rows from {rows.start} on were appended to tables that end at {index.frontier}")
        index.extend(rows.keys)
        return index

    def truncate(self, index: HashTables, frontier: int) -> HashTables:
        """The codes of rows are their own; the centre stays."""
        if frontier < index.frontier:
            index.frontier, index.generation = frontier, index.generation + 1
        return index

    def select(self, ctx: MethodContext, layer: int, index: HashTables, rows: StepRows) -> Selection:
        """Sample rows of the region for the step's one row, and give each the logarithm of its inverse probability.

        Reads the keys of the sampled rows. Errors: `UnsupportedError` for a step of several rows, which do not share a
        sample; `ConfigurationError` for a budget that needs scores; `RetrievalError` when rows are not hashed yet.
        """
        _require_cap(ctx.budget)
        if rows.queries.shape[1] != 1:
            raise UnsupportedError(
                Reason.OPERATION_UNSUPPORTED, f"MagicPIG samples for one row at a time, not for {rows.queries.shape[1]}"
            )
        first, stop = ctx.region
        if index.frontier < stop:
            raise _gap(f"rows up to {stop} may be sampled, but the tables end at {index.frontier}")
        kv_heads, group = ctx.geometry.kv_heads, ctx.geometry.group
        queries = rows.queries.reshape(kv_heads, group, -1)
        # A query is not centred: planes go through the origin of the centred keys, and its length does not matter.
        counts = collision_counts(simhash(queries, index.planes, self.tables), index.codes[..., first:stop])
        seen = counts.amax(1) if self.owner is Owner.KV_HEAD else counts.flatten(0, 1)
        listed, share, capped = _sample(seen, ctx, layer, rows.start)
        owners, width = listed.shape
        if width == 0:
            return replace(Selection.none(self.owner, owners, listed.device), candidates=stop - first, capped=capped)
        units = torch.where(listed == NO_UNIT, NO_UNIT, listed + first)
        centres = index.centre.repeat_interleave(owners // kv_heads, 0).unsqueeze(1)
        keys = ctx.keys_at(layer, units).float() - centres
        cosine = cosines(queries.reshape(owners, -1, queries.shape[-1]), keys).view(kv_heads * group, width)
        heads_each = kv_heads * group // owners
        bias = self._bias(cosine) - torch.log(share).repeat_interleave(heads_each, 0).unsqueeze(-1)
        each = listed.repeat_interleave(heads_each, 0)
        own = counts.flatten(0, 1).gather(-1, each.clamp_min(0)) >= COLLISIONS
        bias = bias.float().masked_fill(~own, NOT_SAMPLED).masked_fill(each == NO_UNIT, 0.0)
        return Selection(self.owner, units, stop - first, log_bias=bias, capped=capped)

    def _bias(self, cosine: Tensor) -> Tensor:
        log_u = log_inclusion_probability(cosine, self.bits, self.tables)
        return -log_u if self.weight is InverseWeight.PAPER else -torch.log(torch.exp(log_u) + CODE_EPSILON)


def _sample(counts: Tensor, ctx: MethodContext, layer: int, position: int) -> tuple[Tensor, Tensor, bool]:
    """From collisions [owners, n] to the rows that were sampled, as far as the budget goes.

    Returns int64 [owners, m], most collisions first, filled up with `NO_UNIT`; the share of each owner's sample that is
    in it, float64 [owners]; and whether any was cut. A sample that is too large is cut to a random part of itself:
    each row stays with the same probability, so that with the share in its weight the sum stays unbiased, as it would
    not if the rows with most collisions stayed.
    """
    owner, row = (counts >= COLLISIONS).nonzero(as_tuple=True)
    sizes = torch.bincount(owner, minlength=counts.shape[0])
    column = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[owner]
    listed = torch.full((counts.shape[0], int(sizes.max())), NO_UNIT, device=row.device)
    listed[owner, column] = row
    if listed.shape[1] > ctx.allowance:
        lots = torch.rand(listed.shape, generator=ctx.generator(layer, f"magicpig/cut/{position}")).to(row.device)
        order = torch.sort(lots.masked_fill(listed == NO_UNIT, -1.0), descending=True, stable=True).indices
        listed = listed.gather(-1, order[:, : ctx.allowance])
    share = (ctx.allowance / sizes.double().clamp_min(1.0)).clamp_max(1.0)
    found = counts.gather(-1, listed.clamp_min(0)).masked_fill(listed == NO_UNIT, 0)
    best = torch.sort(found, descending=True, stable=True).indices
    return listed.gather(-1, best), share, bool((sizes > ctx.allowance).any())


def _require_cap(budget: SelectionBudget) -> None:
    if isinstance(budget, Threshold | EstimatedMass):
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"MagicPIG samples rows without ranking them, so budget={budget!r} has no meaning for it",
            "pass Rows or Fraction, which cap the sample",
        )


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"MagicPIG.{field} must be {wanted}, got {value!r}")


def _gap(cause: str) -> RetrievalError:
    return RetrievalError(Reason.INDEX_FRONTIER_GAP, cause, "build the index again", field="index.frontier")
