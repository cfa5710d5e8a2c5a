from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_parts import Layer, attend, golden, support_mask, support_of
from torch import Tensor

from kvstrata.contract.budget import EstimatedMass, Fraction, Persistent, Rows, SelectionBudget, Threshold
from kvstrata.contract.method import GroupSharing, Owner, QueryVariant
from kvstrata.errors import ConfigurationError, Reason, RetrievalError, StateError
from kvstrata.methods.equalised_counts import Comparison, CountRule, ThresholdBest
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.infinigen import InfiniGen, InfiniGenFromKeys, SpeculationNorm
from kvstrata.methods.interface import Geometry, StepRows
from kvstrata.methods.partial_keys import PartialKeys
from kvstrata.methods.row_pool import PoolPolicy, pool_recall
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.methods.skewing import ColumnRule

SHARINGS = (GroupSharing.SEPARATE, GroupSharing.MAX, GroupSharing.MEAN, GroupSharing.SOFTMAX_SUM)
EVERYTHING = InfiniGen(alpha=math.inf, cap_share=1.0, partial_ratio=1.0)

layers = st.builds(
    Layer.random,
    tokens=st.integers(2, 70),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([1, 5, 16]),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
configurations = st.builds(
    InfiniGen,
    alpha=st.sampled_from([0.0, 1.0, 5.0, math.inf]),
    cap_share=st.sampled_from([0.1, 0.2, 1.0]),
    cap_rows=st.sampled_from([None, 1, 7]),
    partial_ratio=st.sampled_from([0.1, 0.3, 1.0]),
    sample_rows=st.sampled_from([1, 8, 1024]),
    sharing=st.sampled_from(SHARINGS),
    columns=st.sampled_from(ColumnRule),
    comparison=st.sampled_from(Comparison),
    count=st.sampled_from(CountRule),
    best=st.sampled_from(ThresholdBest),
    pool_share=st.sampled_from([0.3, 1.0]),
    pool_rows=st.sampled_from([None, 5]),
    pool_policy=st.sampled_from(PoolPolicy),
)
budgets = st.one_of(
    st.builds(Rows, st.integers(1, 80)),
    st.builds(Fraction, st.floats(0.01, 1.0)),
    st.builds(Threshold, st.floats(0, 10), st.integers(1, 80)),
    st.builds(EstimatedMass, st.floats(0.01, 1.0), st.integers(1, 80)),
)


class View:
    """A model of one projection: `weight` [query_heads, head_dim, hidden_size]; positions turn nothing but are noted.

    Attributes: positions: of the last rotation. norms: layers whose norm was asked for.
    """

    def __init__(self, weight: Tensor, kv_heads: int = 1) -> None:
        self.weight, self._kv_heads = weight, kv_heads
        self.positions: list[int] = []
        self.norms: list[int] = []

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        self.norms.append(layer)
        return hidden

    def project(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries = normed @ self.weight.mT
        return queries, queries[: self._kv_heads], queries[: self._kv_heads]

    def rotate(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        self.positions = positions.tolist()
        return states


def _built(
    method: InfiniGen, layer: Layer, visible: int | None = None, budget: SelectionBudget | int = 1000
) -> PartialKeys:
    stop = layer.tokens if visible is None else visible
    ctx = layer.context(budget, stop)
    index = method.observe(ctx, 0, None, layer.step(0, stop))
    return method.build(ctx, 0, index)


def _choose(method: InfiniGen, layer: Layer, ctx: InMemoryContext) -> tuple[PartialKeys, Selection]:
    index = _built(method, layer)
    return index, method.select(ctx, 0, index, layer.last_step())


def _rows(selection: Selection) -> list[list[int]]:
    return [sorted(row) for row in selection.units.tolist()]


def _golden_context(keys: Tensor, visible: int, view: View) -> InMemoryContext:
    """One head for each K/V head, whose queries are scaled already."""
    dim = keys.shape[-1]
    geometry = Geometry(1, 2, 2, dim, 1.0, (None,))
    return InMemoryContext(
        geometry,
        {0: (keys, keys)},
        Rows(1000),
        Persistent(0, 1),
        visible,
        view=view,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("suffix", ["", "_2"])
def test_offloading_code_speculates_the_same_rows(suffix: str) -> None:
    arrays, facts = golden("infinigen")
    values = facts["parameters"]
    method = InfiniGen(
        alpha=values[f"alpha{suffix}"],
        cap_rows=values[f"cap{suffix}"],
        partial_ratio=values["partial_ratio"],
        columns=ColumnRule.QUERIES,
        comparison=Comparison.ABOVE,
        count=CountRule.TRUNCATED_MEAN,
    )
    view = View(arrays["w_q_cat"].view(2, 16, 33))
    ctx = _golden_context(arrays["key"][0], 40, view)
    seen = StepRows(0, arrays["query"][0], arrays["key"][0], arrays["key"][0])
    index = method.build(ctx, 0, method.observe(ctx, 0, None, seen))

    assert index.basis is not None
    assert [sorted(15 - column for column in row) for row in index.basis.columns.tolist()] == arrays[
        "partial_ids"
    ].tolist()
    expected = arrays["partial_key_cache"].transpose(0, 1)
    signs = torch.where((index.keys.flip(-1) * expected).sum(1, keepdim=True) < 0, -1.0, 1.0)
    torch.testing.assert_close(index.keys.flip(-1) * signs, expected, rtol=1e-3, atol=1e-3)

    ctx.visible = 41
    hidden = arrays["hidden_next"][0]
    queries, _, _ = view.project(0, hidden)
    torch.testing.assert_close(index.scores(queries), arrays["spec_scores"], rtol=1e-3, atol=1e-3)
    selection = method.speculate(ctx, 0, index, hidden)
    assert selection is not None
    assert _rows(selection) == arrays[f"selected_ids{suffix}"].tolist()
    assert index.last is not None
    assert list(index.last.uncapped) == arrays[f"above_threshold{suffix}"].tolist()
    assert index.last.equalised == int(arrays[f"mean_count{suffix}"])
    assert index.last.cap == values[f"cap{suffix}"]
    assert selection.capped == (suffix == "_2")


def test_accuracy_code_keeps_the_same_rows() -> None:
    arrays, facts = golden("infinigen")
    tokens = facts["parameters"]["acc_T"]
    method = InfiniGen(
        alpha=facts["parameters"]["alpha"],
        cap_rows=int(facts["parameters"]["acc_cap_ratio"] * tokens),
        partial_ratio=1.0,
        count=CountRule.TRUNCATED_MEAN,
        best=ThresholdBest.FIRST_HEAD,
    )
    # With unit vectors for keys a query is its scores.
    keys = torch.eye(tokens).expand(2, -1, -1)
    for row in range(facts["parameters"]["acc_T"] // 5, tokens):  # before that they keep everything
        query = arrays["acc_scores"][:, row]
        ctx = _golden_context(keys, row + 1, View(query.unsqueeze(-1)))
        index = method.build(ctx, 0, method.observe(ctx, 0, None, StepRows(0, *[keys[:, : row + 1]] * 3)))
        ctx.visible += 1
        selection = method.speculate(ctx, 0, index, torch.ones(1, 1))
        assert selection is not None
        kept = [[row for row in head if row != NO_UNIT] for head in _rows(selection)]
        assert kept == [head.nonzero().flatten().tolist() for head in arrays["acc_kept"][:, row]]


def test_speculation_rehearses_the_layer_at_the_steps_position() -> None:
    layer = Layer.random(40, kv_heads=2, group=2, head_dim=8)
    index = _built(EVERYTHING, layer, 39)
    hidden = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    view = View(torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(4)), 2)
    ctx = layer.context(10)
    ctx.view = view  # type: ignore[assignment]
    selection = EVERYTHING.speculate(ctx, 0, index, hidden)
    assert selection is not None
    assert view.positions == [39]
    assert view.norms == [0]
    queries, _, _ = view.project(0, hidden)
    scores = (queries @ layer.k[:, :39].repeat_interleave(2, 0).mT)[:, 0] * 8**-0.5
    shared = (scores - scores.amax(-1, keepdim=True)).view(2, 2, 39).amax(1)
    assert _rows(selection) == shared.topk(9).indices.sort(-1).values.tolist()
    assert selection.variant is QueryVariant.PREDICTED
    assert index.last is not None
    assert index.last.variant is QueryVariant.PREDICTED
    replace(EVERYTHING, norm=SpeculationNorm.SOURCE).speculate(ctx, 1, index, hidden)
    assert view.norms == [0, 0]  # that of the layer before


def test_speculation_of_the_actual_query_is_the_actual_choice() -> None:
    layer = Layer.random(60, kv_heads=3, group=3, head_dim=8, seed=2)
    method = InfiniGen(cap_share=1.0)
    predicted_index, actual_index = (_built(method, layer, 59) for _ in range(2))
    ctx = layer.context(30)
    ctx.view = View(layer.q[:, 59:].transpose(1, 2), 3)  # type: ignore[assignment]
    predicted = method.speculate(ctx, 0, predicted_index, torch.ones(1, 1))
    actual = method.select(ctx, 0, method.append(ctx, 0, actual_index, layer.last_step()), layer.last_step())
    assert predicted is not None
    assert actual.variant is QueryVariant.ACTUAL
    # The step's own row can set the bar of the actual choice alone; here it does not.
    assert torch.equal(predicted.units, actual.units)
    assert predicted.candidates == actual.candidates == 59


def test_without_a_model_nothing_is_speculated() -> None:
    layer = Layer.random(20)
    assert InfiniGen().speculate(layer.context(10), 0, _built(InfiniGen(), layer, 19), torch.ones(1, 4)) is None


@given(layers, st.sampled_from(SHARINGS), st.booleans())
def test_all_columns_and_all_rows_equal_exact_attention(layer: Layer, sharing: GroupSharing, from_keys: bool) -> None:
    kind = InfiniGenFromKeys if from_keys else InfiniGen
    method = kind(alpha=math.inf, cap_share=1.0, partial_ratio=1.0, sharing=sharing)
    ctx = layer.context(layer.tokens)
    index, selection = _choose(method, layer, ctx)
    support = support_of(method, index, selection, ctx)
    assert bool(support_mask(support, layer.geometry).all())
    assert selection.estimate is not None
    assert not selection.estimate.any()
    torch.testing.assert_close(
        attend(layer, support, layer.last_step()).double(),
        layer.dense_output(layer.last_step()),
        rtol=1e-4,
        atol=1e-4,
    )


@given(layers)
def test_with_all_columns_the_rows_are_the_exact_best(layer: Layer) -> None:
    method = replace(EVERYTHING, sharing=GroupSharing.SEPARATE)
    _, selection = _choose(method, layer, layer.context(6))
    weights = layer.dense(layer.last_step())[:, 0, :-1]
    best = weights.topk(min(5, layer.tokens - 1)).values.sum(-1)
    got = weights.gather(-1, selection.units).sum(-1)
    # Partial keys have the precision of the keys.
    tolerance = 1e-4 if layer.k.dtype == torch.float32 else 5e-2
    assert bool((got >= best - tolerance).all())


@given(layers, configurations, budgets, st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_choices_are_legal_whatever_the_configuration(
    layer: Layer, method: InfiniGen, budget: SelectionBudget, sinks: int, recent: int, multiple: bool
) -> None:
    ctx = layer.context(budget, sinks=sinks, recent=recent)
    index = _built(method, layer)
    step = layer.last_step(min(2, layer.tokens) if multiple else 1)
    selection = method.select(ctx, 0, index, step)
    real = selection.units != NO_UNIT
    counts = real.sum(-1)
    first, stop = ctx.region
    assert selection.owner is method.owner
    assert bool((counts <= ctx.allowance).all())
    assert not real.any() or first <= int(selection.units[real].min()) <= int(selection.units.max()) < stop
    if isinstance(budget, Rows | Fraction):
        limit = method.cap_rows or Fraction(method.cap_share).limit(layer.tokens)
        assert bool((counts <= limit).all())
    assert bool((pool_recall(index.pool, selection.units) == 1).all())
    assert index.last is not None
    assert selection.units.shape[1] <= min(index.last.equalised, index.last.cap)
    assert selection.capped == (index.last.equalised > index.last.cap)
    assert selection.estimate is not None
    assert bool(torch.isfinite(selection.estimate).all())
    assert bool(((selection.estimate >= 0) & (selection.estimate <= 1)).all())
    support_of(method, index, selection, ctx)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_head_gets_the_mean_of_the_counts(sharing: GroupSharing) -> None:
    layer = Layer.random(200, kv_heads=3, group=3, seed=4, spread=3)
    method = InfiniGen(alpha=2.0, cap_share=1.0, sharing=sharing)
    index, selection = _choose(method, layer, layer.context(200))
    assert index.last is not None
    assert len(set(index.last.uncapped)) > 1
    assert index.last.equalised == math.ceil(sum(index.last.uncapped) / len(index.last.uncapped))
    assert (selection.units != NO_UNIT).sum(-1).tolist() == [index.last.equalised] * len(selection.units)


def _given_scores(scores: list[list[float]], kv_heads: int) -> tuple[Layer, int]:
    """A layer whose last query has these scores [query_heads, rows], and a last row that scores far less."""
    rows = len(scores[0])
    keys = torch.eye(rows + 1)[: rows + 1].expand(kv_heads, -1, -1).clone()
    queries = torch.zeros(len(scores), rows + 1, rows + 1)
    queries[:, -1, :rows] = torch.tensor(scores)
    queries[:, -1, rows] = -50.0
    return Layer(queries * (rows + 1) ** 0.5, keys, keys), rows


def test_a_group_reads_what_any_of_its_heads_would_pass() -> None:
    # The second head's scores are lower throughout: raw maxima would never name its best rows.
    layer, _ = _given_scores([[10, 9, 0, 0, 0, 0], [-20, -20, -10, -11, -20, -20]], 1)
    method = InfiniGen(alpha=1.5, cap_share=1.0, partial_ratio=1.0)
    _, selection = _choose(method, layer, layer.context(7))
    assert _rows(selection) == [[0, 1, 2, 3]]
    _, apart = _choose(replace(method, sharing=GroupSharing.SEPARATE), layer, layer.context(7))
    assert _rows(apart) == [[0, 1], [2, 3]]


def test_ties_go_to_the_lower_row() -> None:
    layer, _ = _given_scores([[1, 3, 3, 3, 3, 0]], 1)
    method = InfiniGen(alpha=0.5, cap_rows=2, partial_ratio=1.0)
    layer.k[:, :, :] = layer.k.round()
    scores = (layer.q[:, -1] @ layer.k[0].T)[0, 1:5]
    assert len(set(scores.tolist())) == 1
    index = _built(method, layer)
    assert index.basis is not None
    # Unit vectors themselves as the basis, so that equal scores stay equal to the bit.
    object.__setattr__(index.basis, "projector", torch.eye(7).unsqueeze(0))
    index.truncate(0)
    index.extend(0, layer.k)
    selection = method.select(layer.context(7), 0, index, layer.last_step())
    assert selection.units.tolist() == [[1, 2]]
    assert selection.capped


def test_rows_that_enter_anyway_set_the_bar() -> None:
    layer, _ = _given_scores([[9, 1, 1, 1, 1, 1]], 1)
    method = InfiniGen(alpha=5.0, cap_share=1.0, partial_ratio=1.0)
    _, selection = _choose(method, layer, layer.context(7, sinks=1))
    assert selection.units.shape == (1, 0)
    _, selection = _choose(replace(method, alpha=8.5), layer, layer.context(7, sinks=1))
    assert _rows(selection) == [[1, 2, 3, 4, 5]]


def test_budget_and_cap() -> None:
    layer = Layer.random(100, kv_heads=2, group=1)
    method = InfiniGen(alpha=math.inf)

    def chosen(budget: SelectionBudget, method: InfiniGen = method) -> tuple[int, bool]:
        _, selection = _choose(method, layer, layer.context(budget, sinks=2, recent=8))
        return int((selection.units != NO_UNIT).sum(-1).max()), selection.capped

    assert chosen(Rows(25)) == (15, True)  # persistent rows count in
    assert chosen(Rows(60)) == (20, True)  # the cap does not count them
    assert chosen(Rows(60), replace(method, cap_rows=33)) == (33, True)
    assert chosen(Fraction(0.15)) == (5, True)
    assert chosen(Rows(10)) == (0, True)
    assert chosen(Rows(100), replace(method, cap_share=1.0)) == (90, False)
    # Margin, mass and cap of the budget stand in for those of the method.
    assert chosen(Threshold(0.0, 100))[0] <= 1
    assert chosen(Threshold(1000.0, 100)) == (90, False)
    assert chosen(Threshold(1000.0, 50)) == (40, True)
    assert chosen(EstimatedMass(1.0, 100)) == (90, False)
    assert chosen(EstimatedMass(1.0, 50)) == (40, True)


def test_an_estimated_mass_is_reached_when_scores_are_exact() -> None:
    layer = Layer.random(150, kv_heads=1, group=1, seed=3)
    for mass in (0.5, 0.9, 0.99):
        ctx = layer.context(EstimatedMass(mass, 150), sinks=2, recent=3)
        index, selection = _choose(EVERYTHING, layer, ctx)
        kept = support_mask(support_of(EVERYTHING, index, selection, ctx), layer.geometry)
        weights = layer.dense(layer.last_step())[:, 0]
        held = float((weights * kept).sum())
        assert held >= mass - 1e-6
        fewest = weights[0, selection.units[0, -1]]
        assert held - float(fewest) < mass


def test_estimate_is_the_omitted_mass_when_all_columns_are_kept() -> None:
    layer = Layer.random(150, kv_heads=2, group=3, seed=3)
    ctx = layer.context(40, sinks=2, recent=3)
    index, selection = _choose(EVERYTHING, layer, ctx)
    kept = support_mask(support_of(EVERYTHING, index, selection, ctx), layer.geometry)
    omitted = (layer.dense(layer.last_step())[:, 0] * ~kept).sum(-1)
    assert selection.estimate is not None
    torch.testing.assert_close(selection.estimate.double(), omitted, rtol=1e-4, atol=1e-6)


def test_a_row_that_the_pool_evicted_cannot_be_selected() -> None:
    layer, _ = _given_scores([[9, 9, 5, 4, 3, 2]], 1)
    method = InfiniGen(alpha=math.inf, cap_share=1.0, partial_ratio=1.0, pool_rows=5, pool_policy=PoolPolicy.FIFO)
    index, selection = _choose(method, layer, layer.context(7))
    assert _rows(selection) == [[2, 3, 4, 5]]
    assert selection.candidates == 4
    assert selection.estimate is not None
    assert float(selection.estimate) > 0.9  # what the pool hides is left out, and known to be
    assert pool_recall(index.pool, torch.tensor([[0, 1, 2]])).tolist() == pytest.approx([1 / 3])


def test_selection_feeds_the_pool() -> None:
    layer, _ = _given_scores([[9, 8, 1, 1, 1, 1]], 1)
    method = InfiniGen(alpha=2.0, cap_share=1.0, partial_ratio=1.0, pool_rows=7, pool_policy=PoolPolicy.COUNTER)
    index, selection = _choose(method, layer, layer.context(7))
    assert _rows(selection) == [[0, 1]]
    for start in (7, 8):
        method.append(layer.context(7), 0, index, StepRows(start, *[layer.k[:, :1]] * 3))
    assert index.pool.present.tolist() == [[True, True, False, False, True, True, True, True, True]]


def test_queries_of_a_prefill_in_pieces_make_the_same_index() -> None:
    layer = Layer.random(90, kv_heads=2, group=3)
    for most in (1024, 16):
        method = InfiniGen(sample_rows=most)
        ctx = layer.context(50)
        index: PartialKeys | None = None
        for start, stop in ((0, 40), (40, 41), (41, 90)):
            index = method.observe(ctx, 0, index, layer.step(start, stop))
        pieces = method.build(ctx, 0, index)
        whole = _built(method, layer)
        assert pieces.basis is not None
        assert whole.basis is not None
        assert torch.equal(pieces.basis.projector, whole.basis.projector)
        assert torch.equal(pieces.keys, whole.keys)
        assert pieces.sample is None
        assert pieces.columns == 1


@given(layers, st.sampled_from([InfiniGen(), InfiniGenFromKeys(), InfiniGen(columns=ColumnRule.UNION)]))
def test_rows_appended_are_those_of_a_build_with_the_same_columns(layer: Layer, method: InfiniGen) -> None:
    half = max(1, layer.tokens // 2)
    index = _built(method, layer, half)
    ctx = layer.context(50)
    for start in range(half, layer.tokens):
        index = method.append(ctx, 0, index, layer.step(start, start + 1))
    again = method.build(ctx, 0, index)  # keeps basis and columns
    assert again.columns == index.columns
    assert again.basis is index.basis
    assert again.generation > index.generation
    tolerance = 1e-4 if layer.k.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(index.keys.float(), again.keys.float(), rtol=tolerance, atol=tolerance)


def test_a_history_longer_than_one_read_is_built_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer.random(70)
    expected = _built(InfiniGen(), layer)
    monkeypatch.setattr("kvstrata.methods.infinigen._BUILD_ROWS", 32)
    torch.testing.assert_close(_built(InfiniGen(), layer).keys, expected.keys)


def test_without_queries_there_is_no_basis() -> None:
    layer = Layer.random(20)
    with pytest.raises(StateError, match="no queries of layer 0 were observed") as refused:
        InfiniGen().build(layer.context(10), 0, None)
    assert refused.value.reason is Reason.NOT_COMMITTED
    assert not InfiniGen.contract.rebuilds


@pytest.mark.parametrize("most", [1024, 16])
def test_restored_rows_make_a_basis_from_keys(most: int) -> None:
    layer = Layer.random(70, kv_heads=2, group=3)
    method = InfiniGenFromKeys(sample_rows=most)
    assert method.contract.rebuilds
    assert method.observe(layer.context(20), 0, None, layer.step(0, 70)) is None
    index = method.build(layer.context(20), 0, None)
    assert index.basis is not None
    assert index.frontier == 70
    stride = 1 if most == 1024 else 8
    sampled = layer.k[:, ::stride].double()
    energy = (sampled @ index.basis.projector.double()).square().sum(1)
    _, values, _ = torch.linalg.svd(sampled)
    torch.testing.assert_close(energy, values.square().gather(-1, index.basis.columns), rtol=1e-4, atol=1e-3)


def test_taking_rows_back() -> None:
    layer = Layer.random(60)
    method = InfiniGen(cap_share=1.0)
    index = _built(method, layer)
    shorter = method.truncate(index, 50)
    assert shorter is not None
    ctx = layer.context(30, visible=50)
    chosen = method.select(ctx, 0, shorter, layer.step(49, 50))
    assert int(chosen.units.max()) < 49
    assert method.truncate(index, 0) is None


def test_a_gap_is_refused() -> None:
    layer = Layer.random(60)
    with pytest.raises(RetrievalError) as refused:
        InfiniGen().append(layer.context(30), 0, _built(InfiniGen(), layer, 50), layer.step(51, 52))
    assert refused.value.reason is Reason.INDEX_FRONTIER_GAP


def test_zero_keys_and_queries_score_evenly() -> None:
    zeros = torch.zeros(2, 30, 8)
    layer = Layer(zeros, zeros, zeros)
    index, selection = _choose(InfiniGen(cap_share=0.5), layer, layer.context(30))
    assert selection.units.tolist() == [list(range(15))] * 2
    assert selection.estimate is not None
    torch.testing.assert_close(selection.estimate, torch.full((2,), 14 / 30))
    assert index.last is not None
    assert index.last.uncapped == (29, 29)


def test_two_rows_and_an_empty_region() -> None:
    layer = Layer.random(2)
    _, selection = _choose(EVERYTHING, layer, layer.context(2))
    assert selection.units.tolist() == [[0], [0]]
    _, selection = _choose(EVERYTHING, layer, layer.context(2, recent=2))
    assert selection.units.shape == (2, 0)
    assert selection.candidates == 0
    single = Layer.random(1)
    _, selection = _choose(InfiniGen(), single, single.context(1))
    assert selection.units.shape == (2, 0)


def test_owner_and_dense_layers() -> None:
    geometry = Layer.random(4).geometry
    assert InfiniGen().owner is Owner.KV_HEAD
    assert InfiniGen(sharing=GroupSharing.SEPARATE).owner is Owner.QUERY_HEAD
    assert InfiniGen().dense(replace(geometry, layers=4)) == (0, 1)
    assert InfiniGen().contract.needs_hidden


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", -1.0),
        ("alpha", math.nan),
        ("alpha", "5"),
        ("cap_share", 0.0),
        ("cap_share", 1.5),
        ("cap_rows", 0),
        ("cap_rows", 2.5),
        ("partial_ratio", 0.0),
        ("partial_ratio", True),
        ("pool_share", -0.1),
        ("pool_rows", 0),
        ("pool_policy", "lru"),
        ("sample_rows", 0),
        ("dense_layers", -1),
        ("sharing", GroupSharing.SUM),
        ("sharing", GroupSharing.QUERY_SUM),
        ("columns", "sum"),
        ("comparison", None),
        ("count", "mean"),
        ("best", "own"),
        ("norm", "target"),
    ],
)
def test_settings_that_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"InfiniGen\.{field} must be .*, got ") as refused:
        InfiniGen(**{field: value})  # type: ignore[arg-type]
    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_every_setting_has_its_own_digest() -> None:
    plain = InfiniGen()
    others = [replace(plain, alpha=4.0), replace(plain, count=CountRule.TRUNCATED_MEAN), InfiniGenFromKeys()]
    assert len({each.digest for each in (plain, *others)}) == 4
