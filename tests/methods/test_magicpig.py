"""MagicPIG against vectors of the authors' reference, and what an estimator has to be true to."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.contract.budget import EstimatedMass, Fraction, Persistent, Rows, SelectionBudget, Threshold
from kvstrata.contract.method import AnswerClass, ComputeSite, Owner
from kvstrata.errors import ConfigurationError, Reason, RetrievalError, UnsupportedError
from kvstrata.kernels.selected import selected_state
from kvstrata.kernels.state import PartialState
from kvstrata.methods.hash_tables import HashTables, Projectors, ProjectorScope
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.interface import Geometry, StepRows
from kvstrata.methods.magicpig import NOT_SAMPLED, InverseWeight, MagicPIG
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.methods.simhash import (
    collision_counts,
    cosines,
    inclusion_probability,
    log_inclusion_probability,
    simhash,
)
from kvstrata.placement.expansion import Support, expand

GOLDEN = Path(__file__).parents[1] / "golden" / "methods" / "magicpig.npz"
PER_HEAD = ProjectorScope.KV_HEAD_AND_LAYER


class Case:
    """One layer of rows, the last of which is the step's."""

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        method: MagicPIG,
        budget: SelectionBudget | None = None,
        persistent: Persistent | None = None,
        seed: int = 0,
        layers: int = 1,
    ) -> None:
        self.queries, self.keys, self.values, self.method = queries, keys, values, method
        tokens, dim = keys.shape[1:]
        geometry = Geometry(layers, queries.shape[0], keys.shape[0], dim, dim**-0.5, (None,) * layers)
        self.ctx = InMemoryContext(
            geometry,
            dict.fromkeys(range(layers), (keys, values)),
            budget or Rows(tokens),
            persistent or Persistent(2, 3),
            tokens,
            basis=method.prepare(None, geometry),
            seed=seed,
        )
        self.step = StepRows(tokens - 1, queries, keys[:, -1:], values[:, -1:])

    @classmethod
    def random(
        cls,
        method: MagicPIG,
        tokens: int = 60,
        kv_heads: int = 2,
        group: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        data_seed: int = 0,
        **settings: Any,
    ) -> Case:
        generator = torch.Generator().manual_seed(data_seed)
        queries = torch.randn(kv_heads * group, 1, dim, generator=generator) * 2
        keys, values = torch.randn(2, kv_heads, tokens, dim, generator=generator)
        return cls(queries.to(dtype), (keys + 1.5).to(dtype), values.to(dtype), method, **settings)

    def select(self) -> tuple[HashTables, Selection]:
        index = self.method.build(self.ctx, 0, None)
        return index, self.method.select(self.ctx, 0, index, self.step)

    def support(self, index: HashTables, selection: Selection) -> Support:
        return expand(self.method, index, selection, self.ctx.geometry, self.ctx.persistent, self.ctx.visible)

    def attend(self, support: Support, centre: Tensor | None = None) -> PartialState:
        """Over sampled and static rows, with their keys as they are or less a centre [kv_heads, head_dim]."""
        keys = self.keys if centre is None else self.keys.float() - centre.unsqueeze(1)
        scale = self.ctx.geometry.scale
        each = torch.arange(support.rows.shape[0]) // (support.rows.shape[0] // self.keys.shape[0])
        chosen = (each.unsqueeze(-1), support.rows.clamp_min(0))
        static = torch.cat((torch.arange(support.sinks), torch.arange(support.recent, support.visible)))
        sampled = selected_state(
            self.queries,
            keys[chosen],
            self.values[chosen],
            scale,
            (support.rows != NO_UNIT).unsqueeze(1),
            support.log_bias,
        )
        return sampled.merge(selected_state(self.queries, keys[:, static], self.values[:, static], scale))

    def output(self) -> Tensor:
        """[query_heads, head_dim]."""
        return self.attend(self.support(*self.select())).output()[:, 0]

    def dense(self) -> Tensor:
        return selected_state(self.queries, self.keys, self.values, self.ctx.geometry.scale).output()[:, 0]


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    with np.load(GOLDEN) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def golden_case(golden: dict[str, Tensor], **options: Any) -> tuple[Case, HashTables]:
    method = MagicPIG(bits=3, tables=8, **options)
    keys = torch.cat((golden["k"], golden["k_new"].unsqueeze(1)), dim=1)
    values = torch.cat((golden["v"], golden["v_new"].unsqueeze(1)), dim=1)
    # The new token is static too.
    case = Case(golden["q"].unsqueeze(1), keys, values, method, persistent=Persistent(4, 9))
    index = HashTables(method.build(case.ctx, 0, None).centre, golden["projectors"], 8, 0)
    index.extend(keys)
    return case, index


def test_golden_codes_and_collisions(golden: dict[str, Tensor]) -> None:
    _, index = golden_case(golden)
    torch.testing.assert_close(index.centre, golden["k_mean"])
    # The smallest projection is 4e-4: no sign is in doubt.
    assert torch.equal(index.codes[..., 4:56].transpose(1, 2).to(torch.int16), golden["k_codes"])
    query_codes = simhash(golden["q"].view(2, 2, 16), golden["projectors"], 8)
    assert torch.equal(query_codes.transpose(1, 2).reshape(4, 8).to(torch.int16), golden["q_codes"])
    counts = collision_counts(query_codes, index.codes[..., 4:56]).view(4, 52)
    assert torch.equal(counts.long(), golden["collisions"])
    assert torch.equal(counts >= 2, golden["sampled_mask"])


def test_golden_inclusion_probabilities(golden: dict[str, Tensor]) -> None:
    cosine = cosines(golden["q"].view(2, 2, 16), golden["k_centred"]).view(4, 52)
    torch.testing.assert_close(cosine.double(), golden["cosine"], rtol=0, atol=1e-6)
    u = inclusion_probability(cosine, 3, 8)
    torch.testing.assert_close(u.float(), golden["u"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(inclusion_probability(golden["cosine"], 3, 8), golden["u_f64"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("owner", [Owner.QUERY_HEAD, Owner.KV_HEAD])
def test_golden_output(golden: dict[str, Tensor], owner: Owner) -> None:
    case, index = golden_case(golden, weight=InverseWeight.CODE, owner=owner)
    selection = case.method.select(case.ctx, 0, index, case.step)
    output = case.attend(case.support(index, selection)).output()[:, 0]
    torch.testing.assert_close(output, golden["out"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(output.double(), golden["out_f64"], rtol=1e-3, atol=1e-4)
    if owner is Owner.QUERY_HEAD:
        ids = [sorted(unit for unit in units if unit != NO_UNIT) for units in selection.units.tolist()]
        assert ids == [[unit for unit in units if unit != -1] for units in golden["sampled_ids"].tolist()]


def test_the_papers_weight_is_the_inverse_probability_alone(golden: dict[str, Tensor]) -> None:
    case, index = golden_case(golden)
    selection = case.method.select(case.ctx, 0, index, case.step)
    output = case.attend(case.support(index, selection)).output()[:, 0]
    scores = (golden["q"].double().view(2, 2, 16) @ case.keys.double().mT).view(4, 65) / 4
    weights = torch.exp(scores)
    weights[:, 4:56] *= golden["sampled_mask"] / golden["u_f64"]
    values = case.values.double().repeat_interleave(2, 0)
    wanted = ((weights / weights.sum(-1, keepdim=True)).unsqueeze(1) @ values)[:, 0]
    torch.testing.assert_close(output.double(), wanted, rtol=1e-3, atol=1e-4)
    assert (output - golden["out"]).abs().max() > 1e-4  # the code's variant is another answer


def test_the_codes_weight_is_smaller_for_rows_sampled_against_the_odds() -> None:
    paper, code = (Case.random(MagicPIG(bits=4, tables=12, weight=weight)) for weight in InverseWeight)
    (_, ours), (_, theirs) = paper.select(), code.select()
    assert torch.equal(ours.units, theirs.units)
    assert ours.log_bias is not None
    assert theirs.log_bias is not None
    torch.testing.assert_close(torch.exp(-theirs.log_bias), torch.exp(-ours.log_bias) + 1e-4 * (ours.units != NO_UNIT))


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_selection_names_what_collides_with_its_log_probability(group: int, dim: int, dtype: torch.dtype) -> None:
    case = Case.random(MagicPIG(bits=3, tables=9), kv_heads=3, group=group, dim=dim, dtype=dtype, data_seed=group)
    index, selection = case.select()
    for head in range(3 * group):
        keys = case.keys[head // group].float()
        centred = keys - keys[2:57].mean(0)
        planes = index.planes[0]
        bits = ((centred @ planes > 0) == (case.queries[head].float() @ planes > 0)).view(60, 9, 3)
        sampled = (bits.all(-1).sum(-1) >= 2).nonzero().flatten().tolist()
        named = {u: column for column, u in enumerate(selection.units[head].tolist()) if u != NO_UNIT}
        assert sorted(named) == [row for row in sampled if 2 <= row < 57]
        cosine = torch.cosine_similarity(case.queries[head].double(), centred.double(), dim=-1)
        wanted = -log_inclusion_probability(cosine, 3, 9)
        assert selection.log_bias is not None
        for row, column in named.items():
            assert selection.log_bias[head, column].item() == pytest.approx(wanted[row].item(), abs=1e-4)
    assert selection.candidates == 55
    assert not selection.capped
    assert selection.estimate is None


@given(st.integers(0, 2**31), st.floats(-30, 30))
def test_centring_leaves_attention_as_it_is(seed: int, far: float) -> None:
    """A centre moves all scores of a query equally, static rows included: keys may be attended as they are."""
    case = Case.random(MagicPIG(bits=2, tables=6), data_seed=seed, tokens=24)
    support = case.support(*case.select())
    centre = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed)) + far / 16
    torch.testing.assert_close(
        case.attend(support).output(), case.attend(support, centre).output(), rtol=1e-3, atol=1e-4
    )


def test_centring_the_sampled_rows_alone_would_not() -> None:
    case = Case.random(MagicPIG(bits=2, tables=6))
    index, selection = case.select()
    assert selection.log_bias is not None
    support = case.support(index, selection)
    assert support.log_bias is not None
    shift = (case.queries[:, 0] * index.centre.repeat_interleave(2, 0)).sum(-1, keepdim=True) / 4
    other = replace(support, log_bias=support.log_bias - shift)
    assert (case.attend(support).output() - case.attend(other).output()).abs().max() > 1e-2


def many_draws(method: MagicPIG, draws: int, tokens: int = 150, **settings: Any) -> Case:
    """The same rows in every K/V head, each with planes of its own: one call samples `draws` times."""
    one = Case.random(method, tokens=tokens, kv_heads=1, group=2)
    return Case(
        one.queries.repeat(draws, 1, 1),
        one.keys.repeat(draws, 1, 1),
        one.values.repeat(draws, 1, 1),
        replace(method, projectors=PER_HEAD),
        **settings,
    )


def test_the_estimator_converges_with_the_number_of_tables() -> None:
    errors, biases = [], []
    for tables in (12, 36, 108, 324):
        case = many_draws(MagicPIG(bits=5, tables=tables), 400)
        wanted = case.dense().view(400, 2, -1)
        missed = case.output().view(400, 2, -1) - wanted
        scale = wanted[0].square().sum(-1).mean().sqrt()
        errors.append((missed.square().sum(-1).mean().sqrt() / scale).item())
        biases.append((missed.mean(0).square().sum(-1).mean().sqrt() / scale).item())
    # Root mean square error and the distance of the mean output from the dense one, both relative to its length.
    assert all(after < before / 1.7 for before, after in itertools.pairwise(errors)), errors
    assert all(after < before / 1.7 for before, after in itertools.pairwise(biases)), biases
    assert errors[-1] < 0.02
    assert all(bias < error / 2 for bias, error in zip(biases, errors, strict=True)), (biases, errors)


@pytest.mark.parametrize("owner", [Owner.QUERY_HEAD, Owner.KV_HEAD])
@pytest.mark.parametrize("budget", [None, Rows(20)])
def test_both_sums_of_the_softmax_are_unbiased(owner: Owner, budget: Rows | None) -> None:
    """Only their ratio is not; and a sample that a budget cuts stays unbiased. Within 4.5 standard errors of a mean
    over 3000 draws, for normaliser and all channels of two query heads."""
    case = many_draws(MagicPIG(bits=3, tables=10, owner=owner), 3000, tokens=60, budget=budget)
    index, selection = case.select()
    assert selection.capped is (budget is not None)
    state = case.attend(case.support(index, selection))
    sums = torch.cat((state.l.unsqueeze(-1), state.u), -1)[:, 0] * torch.exp(state.m)
    sums = sums.double().view(3000, 2, -1)
    scores = (case.queries[:2, 0] @ case.keys[0].T / 4).double()
    ones_and_values = torch.cat((torch.ones(60, 1), case.values[0]), -1).double()
    wanted = torch.exp(scores) @ ones_and_values
    deviations = (sums.mean(0) - wanted).abs() / (sums.std(0) / math.sqrt(3000))
    assert deviations.max() < 4.5


@pytest.mark.parametrize("owner", [Owner.QUERY_HEAD, Owner.KV_HEAD])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_many_tables_sample_every_row_and_give_exact_attention(owner: Owner, group: int) -> None:
    case = Case.random(MagicPIG(bits=1, tables=120, owner=owner), group=group)
    index, selection = case.select()
    assert (case.support(index, selection).counts == 60).all()
    torch.testing.assert_close(case.output(), case.dense(), rtol=1e-4, atol=1e-5)


def test_a_budget_of_all_rows_is_still_a_sample() -> None:
    case = Case.random(MagicPIG(bits=6, tables=4), budget=Rows(60))
    index, selection = case.select()
    assert not selection.capped
    assert (case.support(index, selection).counts < 60).all()


@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_shared_list_gives_the_answer_of_separate_ones(group: int) -> None:
    separate = Case.random(MagicPIG(bits=3, tables=8), group=group)
    shared = Case.random(MagicPIG(bits=3, tables=8, owner=Owner.KV_HEAD), group=group)
    (index, selection), (_, union) = separate.select(), shared.select()
    lists = [set(units) - {NO_UNIT} for units in selection.units.tolist()]
    for head, units in enumerate(union.units.tolist()):
        assert set(units) - {NO_UNIT} == set.union(*lists[head * group : (head + 1) * group])
    assert union.log_bias is not None
    assert (union.log_bias == NOT_SAMPLED).any() == (group > 1)
    torch.testing.assert_close(separate.output(), shared.output(), rtol=1e-5, atol=1e-6)
    assert selection.log_bias is not None
    assert (selection.log_bias > NOT_SAMPLED / 2).all()
    assert index.frontier == 60


@pytest.mark.parametrize("owner", [Owner.QUERY_HEAD, Owner.KV_HEAD])
def test_a_budget_cuts_a_sample_to_a_random_part_of_it(owner: Owner) -> None:
    method = MagicPIG(bits=2, tables=10, owner=owner)
    whole = Case.random(method).select()[1]
    cut = Case.random(method, budget=Rows(17)).select()[1]
    less = Case.random(method, budget=Fraction(0.2)).select()[1]  # 12 rows, of which 5 are static
    assert cut.capped
    assert cut.units.shape[1] == 12
    assert less.units.shape[1] == 7
    assert whole.log_bias is not None
    assert cut.log_bias is not None
    for owner_row, (all_units, some, fewer) in enumerate(
        zip(whole.units.tolist(), cut.units.tolist(), less.units.tolist(), strict=True)
    ):
        sampled = {unit: column for column, unit in enumerate(all_units) if unit != NO_UNIT}
        assert set(fewer) < set(some) < set(sampled)
        head = owner_row if owner is Owner.QUERY_HEAD else owner_row * 2
        for column, unit in enumerate(some):
            bias = whole.log_bias[head, sampled[unit]].item()
            wanted = bias if bias == NOT_SAMPLED else bias + math.log(len(sampled) / 12)
            assert cut.log_bias[head, column].item() == pytest.approx(wanted, abs=1e-5)
    again = Case.random(method, budget=Rows(17)).select()[1]
    assert torch.equal(again.units, cut.units)
    other = Case.random(method, budget=Rows(17), seed=1).select()[1]
    assert not torch.equal(other.units, cut.units)


def test_a_budget_that_leaves_no_row_is_reported() -> None:
    case = Case.random(MagicPIG(bits=2, tables=10), budget=Rows(5))
    index, selection = case.select()
    assert selection.units.shape == (4, 0)
    assert selection.capped
    assert selection.candidates == 55
    assert (case.support(index, selection).counts == 5).all()


@pytest.mark.parametrize("budget", [Threshold(2.0, cap=30), EstimatedMass(0.9, cap=30)])
def test_budgets_that_need_scores_are_refused(budget: SelectionBudget) -> None:
    case = Case.random(MagicPIG(), budget=budget)
    with pytest.raises(ConfigurationError, match="without ranking them"):
        case.method.build(case.ctx, 0, None)


def test_rows_beside_the_region_are_not_sampled_and_an_empty_region_gives_nothing() -> None:
    method = MagicPIG(bits=1, tables=60)
    _, selection = Case.random(method, persistent=Persistent(7, 20)).select()
    assert sorted(set(selection.units.flatten().tolist())) == list(range(7, 40))
    empty = Case.random(method, tokens=12, persistent=Persistent(7, 20))
    index, selection = empty.select()
    assert selection.units.shape == (4, 0)
    assert not selection.capped
    torch.testing.assert_close(index.centre, empty.keys.mean(1))
    torch.testing.assert_close(empty.output(), empty.dense())
    only = Case.random(method, tokens=1, persistent=Persistent(0, 1))
    torch.testing.assert_close(only.output(), only.dense())
    # A region of one row: the centre is that row, so it is hashed as a zero vector.
    single = Case.random(MagicPIG(bits=1, tables=2), tokens=6, persistent=Persistent(2, 3))
    assert torch.isfinite(single.output()).all()


@pytest.mark.parametrize("owner", [Owner.QUERY_HEAD, Owner.KV_HEAD])
@pytest.mark.parametrize("weight", list(InverseWeight))
def test_zero_and_equal_vectors_give_numbers(owner: Owner, weight: InverseWeight) -> None:
    for keys, queries in (
        (torch.full((2, 30, 4), 2.0), torch.ones(4, 1, 4)),  # every centred key is zero
        (torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(4, 1, 4)),
        (torch.zeros(2, 30, 4), torch.zeros(4, 1, 4)),
        (torch.arange(240.0).view(2, 30, 4) - 100, -torch.ones(4, 1, 4)),  # along one line: cosines of 1 and -1
        (torch.full((2, 30, 4), 3e38).bfloat16(), torch.full((4, 1, 4), 1e-38).bfloat16()),
    ):
        values = torch.arange(240.0).view(2, 30, 4)
        case = Case(queries, keys, values, MagicPIG(bits=2, tables=40, owner=owner, weight=weight))
        index, selection = case.select()
        assert (selection.units != NO_UNIT).any()
        assert torch.isfinite(index.centre).all()
        output = case.output()
        assert torch.isfinite(output).all()
        assert (output >= 0).all()
        assert (output <= 240).all()


def test_zero_queries_estimate_the_mean_of_the_values() -> None:
    one = Case.random(MagicPIG(), tokens=40, kv_heads=1, group=1)
    draws = 2000
    case = Case(
        torch.zeros(draws, 1, 16),
        one.keys.repeat(draws, 1, 1),
        one.values.repeat(draws, 1, 1),
        MagicPIG(bits=2, tables=12, projectors=PER_HEAD),
    )
    output = case.output()
    assert (output.mean(0) - one.values[0].mean(0)).abs().max() < 0.02
    assert output.std(0).max() > 0.05  # a sample, not the mean itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_appended_rows_get_the_codes_of_the_same_centre(dtype: torch.dtype) -> None:
    """Bit for bit wherever a projection is not zero to rounding; `build` over the whole takes another centre."""
    method = MagicPIG(bits=9, tables=40)
    case = Case.random(method, tokens=300, dtype=dtype)
    case.ctx.visible = 120
    index = method.build(case.ctx, 0, None)
    centre, generation = index.centre.clone(), index.generation
    start = 120
    for count in (1, 1, 50, 1, 127):
        stop = start + count
        rows = StepRows(start, torch.zeros(4, count, 16), case.keys[:, start:stop], case.values[:, start:stop])
        assert method.append(case.ctx, 0, index, rows) is index
        assert index.generation == (generation := generation + 1)
        start = stop
    assert index.frontier == 300
    assert torch.equal(index.centre, centre)
    whole = HashTables(centre, index.planes, 40, 0)
    whole.extend(case.keys)
    projections = (case.keys.float() - centre.unsqueeze(1)) @ index.planes
    doubtful = (projections.view(2, 300, 40, 9).abs() < 1e-5).any(-1).transpose(1, 2)
    assert doubtful.float().mean() < 1e-3
    assert torch.equal(index.codes[~doubtful], whole.codes[~doubtful])
    case.ctx.visible = 300
    rebuilt = method.build(case.ctx, 0, index)
    assert rebuilt.generation > index.generation
    assert not torch.equal(rebuilt.centre, centre)
    # Either samples truthfully: the centre is a choice of coordinates.
    assert not MagicPIG.contract.append_equals_build


def test_an_index_is_cut_and_grows_again() -> None:
    method = MagicPIG(bits=3, tables=6)
    case = Case.random(method, tokens=50)
    index = method.build(case.ctx, 0, None)
    codes, generation = index.codes.clone(), index.generation
    assert method.truncate(index, 20) is index
    assert torch.equal(index.codes, codes[..., :20])
    assert index.generation == generation + 1
    case.ctx.visible = 50
    with pytest.raises(RetrievalError) as caught:
        method.select(case.ctx, 0, index, case.step)
    assert caught.value.reason is Reason.INDEX_FRONTIER_GAP
    with pytest.raises(RetrievalError, match="rows from 49 on were appended to tables that end at 20"):
        method.append(case.ctx, 0, index, case.step)
    method.append(case.ctx, 0, index, StepRows(20, case.queries, case.keys[:, 20:], case.values[:, 20:]))
    assert (index.codes != codes).float().mean() < 0.01


def test_a_step_of_several_rows_is_refused() -> None:
    case = Case.random(MagicPIG(bits=2, tables=4))
    index = case.method.build(case.ctx, 0, None)
    with pytest.raises(UnsupportedError, match="not for 2"):
        case.method.select(case.ctx, 0, index, StepRows(58, torch.zeros(4, 2, 16), case.keys, case.values))


def test_who_shares_planes() -> None:
    geometry = Geometry(40, 4, 2, 16, 0.25, (None,) * 40)

    def planes(scope: ProjectorScope, layer: int, seed: int = 0, shared: Projectors | None = None) -> Tensor:
        ctx = InMemoryContext(geometry, {}, Rows(1), Persistent(), 1, seed=seed)
        return (shared or Projectors()).of(ctx, layer, scope, 30, "cpu")

    model, sixteen, each = ProjectorScope
    assert planes(model, 0).shape == (1, 16, 30)
    assert torch.equal(planes(model, 0), planes(model, 39))
    assert planes(sixteen, 0).shape == planes(each, 0).shape == (2, 16, 30)
    assert torch.equal(planes(sixteen, 16), planes(sixteen, 31))
    assert not torch.equal(planes(sixteen, 15), planes(sixteen, 16))
    assert not torch.equal(planes(each, 3), planes(each, 4))
    assert not torch.equal(planes(each, 3)[0], planes(each, 3)[1])
    assert not torch.equal(planes(model, 0), planes(model, 0, seed=1))
    shared = Projectors()
    assert planes(model, 0, shared=shared) is planes(model, 39, shared=shared)
    assert planes(model, 0, seed=1, shared=shared) is not planes(model, 0, shared=shared)


@pytest.mark.parametrize(("bits", "width"), [(8, 1), (10, 2), (16, 4)])
def test_bytes_of_an_index_and_bytes_read(bits: int, width: int) -> None:
    case = Case.random(MagicPIG(bits=bits, tables=20), tokens=70)
    index = case.method.build(case.ctx, 0, None)
    assert index.nbytes == 2 * 20 * 70 * width + 2 * 16 * 4
    assert case.ctx.read_bytes == 2 * 70 * 16 * 4
    before = case.ctx.read_bytes
    selection = case.method.select(case.ctx, 0, index, case.step)
    assert case.ctx.read_bytes - before == int((selection.units != NO_UNIT).sum()) * 16 * 4
    # Room for rows to come counts as well.
    method = case.method
    method.append(case.ctx, 0, index, StepRows(70, case.queries, case.keys[:, :1], case.values[:, :1]))
    assert index.nbytes == 2 * 20 * (71 + 71 // 8 + 1) * width + 2 * 16 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "MagicPIG.bits must be a whole number of at least 1, got 0"),
        ({"bits": 25}, "MagicPIG.bits must be at most 24, got 25"),
        ({"bits": True}, "MagicPIG.bits"),
        ({"tables": 1}, "MagicPIG.tables must be 2 to 4096"),
        ({"tables": 5000}, "got 5000"),
        ({"owner": Owner.LAYER}, "MagicPIG.owner"),
        ({"projectors": "one"}, "MagicPIG.projectors must be a ProjectorScope, got 'one'"),
        ({"weight": "none"}, "MagicPIG.weight must be a InverseWeight"),
        ({"dense_layers": 2}, "MagicPIG.dense_layers must be a tuple of layer numbers, got 2"),
        ({"dense_layers": (-1,)}, "got \\(-1,\\)"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MagicPIG(**options)


def test_contract_and_dense_layers() -> None:
    contract = MagicPIG.contract
    assert contract.answer is AnswerClass.ESTIMATOR
    assert contract.site is ComputeSite.NEAR_DATA
    assert MagicPIG().owner is Owner.QUERY_HEAD
    assert MagicPIG(owner=Owner.KV_HEAD).owner is Owner.KV_HEAD
    assert MagicPIG().dense(Geometry(30, 9, 3, 64, 0.125, (None,) * 30)) == (0, 16)
    assert MagicPIG(tables=151).digest != MagicPIG().digest != MagicPIG(owner=Owner.KV_HEAD).digest


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods" / "magicpig.md").read_text(encoding="utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    exec(compile(example, "magicpig.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert float(printed[1].split()[2]) == pytest.approx(188, rel=0.02)
    assert printed[-1].endswith("bytes of codes")
