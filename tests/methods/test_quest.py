from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_parts import Layer, attend, choose_last, golden, support_mask, support_of

from kvstrata.contract.budget import EstimatedMass, Fraction, Rows, SelectionBudget, Threshold
from kvstrata.contract.method import GroupSharing, Owner
from kvstrata.errors import ConfigurationError, Reason, RetrievalError
from kvstrata.kernels.selected import selected_state
from kvstrata.methods.interface import StepRows
from kvstrata.methods.quest import EVALUATION_LEAST_PAGES, PageExtrema, PageRule, Quest
from kvstrata.methods.selection import NO_UNIT

SHARED = (GroupSharing.MAX, GroupSharing.SUM, GroupSharing.MEAN, GroupSharing.SOFTMAX_SUM)

layers = st.builds(
    Layer.random,
    tokens=st.integers(1, 70),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([1, 5, 16]),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
page_sizes = st.sampled_from([1, 3, 16, 32, 64])
quests = st.builds(
    Quest,
    page_size=page_sizes,
    sharing=st.sampled_from([GroupSharing.SEPARATE, *SHARED]),
    rule=st.sampled_from(PageRule),
)


def _golden() -> tuple[Layer, dict[str, torch.Tensor]]:
    """The last row's query is the instance's; those of earlier rows are not used."""
    arrays, _ = golden("quest")
    q = torch.zeros(4, 70, 16)
    q[:, -1] = arrays["q"]
    return Layer(q, arrays["k"].transpose(0, 1), arrays["v"].transpose(0, 1)), arrays


def _same_pages(units: torch.Tensor, expected: torch.Tensor) -> None:
    assert [sorted(row) for row in units.tolist()] == expected.tolist()


def test_extrema_and_bounds_are_those_of_the_authors() -> None:
    layer, arrays = _golden()
    index = Quest(page_size=16).build(layer.context(48), 0, None)
    assert torch.equal(index.low, arrays["page_min"])
    assert torch.equal(index.high, arrays["page_max"])
    torch.testing.assert_close(index.bounds(layer.last_step().queries), arrays["page_scores"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        index.bounds(layer.last_step().queries)[:, :-1], arrays["page_scores_code"], rtol=1e-5, atol=1e-5
    )


def test_runtime_rule_keeps_the_last_page_and_the_best_others() -> None:
    layer, arrays = _golden()
    _, selection = choose_last(Quest(rule=PageRule.RUNTIME), layer.context(48), layer)
    assert selection.units[:, 0].tolist() == [4] * 4
    _same_pages(selection.units, arrays["page_ids"])


def test_runtime_rule_spends_one_page_of_the_budget_on_the_last_however_short_it_is() -> None:
    for tokens in range(65, 81):
        layer = Layer.random(tokens, seed=tokens)
        index, selection = choose_last(Quest(rule=PageRule.RUNTIME), layer.context(48), layer)
        support = support_of(Quest(), index, selection, layer.context(48))
        mask = support_mask(support, layer.geometry)
        assert bool(mask[:, 64:].all())
        assert mask[:, :64].sum(-1).tolist() == [32] * 4  # two pages beside the last


def test_evaluation_rule_gives_the_authors_rows_and_output() -> None:
    layer, arrays = _golden()
    quest = Quest(rule=PageRule.EVALUATION)
    # Their token budget of 48 is what may be chosen here; the newest row is persistent.
    index, selection = choose_last(quest, layer.context(49), layer)
    rows = quest.rows_of(index, selection.units)
    mask = torch.zeros(4, 71, dtype=torch.bool).scatter_(1, rows % 71, True)[:, :-1]
    assert torch.equal(mask, arrays["eval_token_mask"])
    heads = torch.arange(4).unsqueeze(-1) // 2
    state = selected_state(
        layer.last_step().queries,
        layer.k[heads, rows.clamp_min(0)],
        layer.v[heads, rows.clamp_min(0)],
        layer.geometry.scale,
        rows != NO_UNIT,
    )
    torch.testing.assert_close(state.output()[:, 0], arrays["eval_out"], rtol=1e-4, atol=1e-5)
    # Each row of a page has the page's bound there.
    copied = index.bounds(layer.last_step().queries).repeat_interleave(16, -1)[:, :70]
    torch.testing.assert_close(copied, arrays["eval_token_scores"], rtol=1e-5, atol=1e-5)


def test_evaluation_rule_keeps_three_pages_however_small_the_budget_is() -> None:
    layer = Layer.random(200)
    _, selection = choose_last(Quest(rule=PageRule.EVALUATION), layer.context(2), layer)
    assert (selection.units != NO_UNIT).sum(-1).tolist() == [EVALUATION_LEAST_PAGES] * 4
    _, selection = choose_last(Quest(rule=PageRule.EVALUATION), layer.context(16 * 5 + 1), layer)
    assert (selection.units != NO_UNIT).sum(-1).tolist() == [5] * 4


@given(layers, page_sizes, st.integers(1, 3))
def test_bound_holds_for_every_row(layer: Layer, page_size: int, rows: int) -> None:
    step = layer.last_step(min(rows, layer.tokens))
    bounds = Quest(page_size=page_size).build(layer.context(1), 0, None).bounds(step.queries)
    scores = step.queries.double() @ layer.k.double().repeat_interleave(layer.geometry.group, 0).mT
    rounding = 1e-5 * (1 + scores.abs().max())
    assert bounds.shape == (layer.geometry.query_heads, -(-layer.tokens // page_size))
    assert bool((bounds.repeat_interleave(page_size, -1)[:, : layer.tokens] >= scores.amax(1) - rounding).all())
    if page_size == 1 and step.queries.shape[1] == 1:  # a page of one row has no slack
        torch.testing.assert_close(bounds.double(), scores.amax(1), rtol=1e-5, atol=1e-5)


@given(layers, page_sizes)
def test_every_row_belongs_to_exactly_one_page(layer: Layer, page_size: int) -> None:
    quest = Quest(page_size=page_size)
    index = quest.build(layer.context(1), 0, None)
    rows = quest.rows_of(index, torch.arange(index.pages).unsqueeze(0))
    assert rows[rows != NO_UNIT].tolist() == list(range(layer.tokens))


@given(layers, page_sizes, st.data())
def test_append_equals_build_of_the_whole(layer: Layer, page_size: int, data: st.DataObject) -> None:
    quest = Quest(page_size=page_size)
    cuts = [*sorted(data.draw(st.sets(st.integers(1, layer.tokens)))), layer.tokens]
    index = quest.build(layer.context(1, visible=cuts[0]), 0, None)
    for start, stop in pairwise(cuts):
        before = index.generation
        index = quest.append(layer.context(1, visible=stop), 0, index, layer.step(start, stop))
        assert index.generation > before
    whole = quest.build(layer.context(1), 0, None)
    assert index.frontier == whole.frontier == layer.tokens
    assert torch.equal(index.low, whole.low)
    assert torch.equal(index.high, whole.high)


def test_a_long_history_is_read_in_pieces_once() -> None:
    layer = Layer.random(20_000, kv_heads=1, group=1, head_dim=2)
    ctx = layer.context(1)
    index = Quest(page_size=48).build(ctx, 0, None)
    assert ctx.read_bytes == 20_000 * 2 * 4
    paged = torch.nn.functional.pad(layer.k, (0, 0, 0, 16), value=torch.inf).view(1, -1, 48, 2)
    assert torch.equal(index.low, paged.amin(2))


@given(layers, page_sizes, st.data())
def test_taken_back_and_grown_again_it_equals_build_of_the_whole(
    layer: Layer, page_size: int, data: st.DataObject
) -> None:
    quest = Quest(page_size=page_size)
    stop = data.draw(st.integers(1, layer.tokens))
    index: PageExtrema | None = quest.build(layer.context(1, visible=stop), 0, None)
    kept_from = (stop - 1) // page_size * page_size  # keys are kept of the page that grew last
    for _ in range(3):  # rows that replace others differ from them
        assert index is not None
        frontier = data.draw(st.integers(0, index.frontier))
        before = index.generation
        index = quest.truncate(index, frontier)
        if frontier == 0 or (frontier <= kept_from and frontier % page_size):
            assert index is None
            return
        assert index is not None
        assert index.frontier == frontier
        assert index.generation > before
        layer.k[:, frontier:] += 1
        stop = data.draw(st.integers(frontier, layer.tokens))
        kept_from = min(kept_from, frontier) if stop == frontier else (stop - 1) // page_size * page_size
        index = quest.append(layer.context(1, visible=stop), 0, index, layer.step(frontier, stop))
        whole = quest.build(layer.context(1, visible=stop), 0, None)
        assert torch.equal(index.low, whole.low)
        assert torch.equal(index.high, whole.high)


def test_index_bytes_are_two_rows_a_page_and_the_keys_of_the_last() -> None:
    layer = Layer.random(640, kv_heads=3, head_dim=16, dtype=torch.bfloat16)
    row = 3 * 16 * 2
    assert Quest(page_size=64).build(layer.context(1), 0, None).nbytes == (10 * 2 + 64) * row
    assert Quest(page_size=64).build(layer.context(1, visible=580), 0, None).nbytes == (10 * 2 + 4) * row


def test_rows_that_do_not_continue_the_index_are_refused() -> None:
    layer = Layer.random(40)
    index = Quest().build(layer.context(1, visible=20), 0, None)
    for start in (19, 21):
        with pytest.raises(RetrievalError, match=f"rows from {start} on .* end at 20") as refused:
            Quest().append(layer.context(1), 0, index, layer.step(start, 22))
        assert refused.value.reason is Reason.INDEX_FRONTIER_GAP
    assert index.frontier == 20


@given(layers, quests, st.integers(1, 3))
def test_budget_of_all_rows_is_exact_attention(layer: Layer, quest: Quest, rows: int) -> None:
    rows = min(rows, layer.tokens)
    step, ctx = layer.last_step(rows), layer.context(layer.tokens)
    index, selection = choose_last(quest, ctx, layer, rows)
    support = support_of(quest, index, selection, ctx)
    assert bool(support_mask(support, layer.geometry).all())
    torch.testing.assert_close(attend(layer, support, step).double(), layer.dense_output(step), rtol=1e-4, atol=1e-5)
    assert selection.estimate is not None
    assert selection.estimate.tolist() == [0.0] * layer.geometry.query_heads


budgets = st.one_of(
    st.builds(Rows, st.integers(1, 80)),
    st.builds(Fraction, st.floats(0.01, 1)),
    st.builds(Threshold, st.floats(0, 20), st.integers(1, 80)),
    st.builds(EstimatedMass, st.floats(0.01, 1), st.integers(1, 80)),
)


@given(layers, quests, budgets, st.integers(0, 5), st.integers(1, 9))
def test_no_budget_is_passed(layer: Layer, quest: Quest, budget: SelectionBudget, sinks: int, recent: int) -> None:
    ctx = layer.context(budget, sinks=sinks, recent=recent)
    index, selection = choose_last(quest, ctx, layer)
    support = support_of(quest, index, selection, ctx)
    first, stop = ctx.region
    assert selection.owner is quest.owner
    assert selection.candidates <= index.pages
    allowed = ctx.allowance
    if quest.rule is PageRule.EVALUATION:
        allowed = max(allowed, EVALUATION_LEAST_PAGES * quest.page_size)
    assert int((support.rows != NO_UNIT).sum(-1).max()) <= allowed
    # Pages without a row to offer are never named.
    named = selection.units[selection.units != NO_UNIT]
    assert bool(((named + 1) * quest.page_size > first).all())
    assert bool((named * quest.page_size < stop).all())
    assert selection.estimate is not None
    assert selection.estimate.shape == (layer.geometry.query_heads,)
    assert bool(((selection.estimate >= 0) & (selection.estimate <= 1)).all())


@given(layers, quests, st.integers(1, 80), st.integers(0, 30))
def test_a_smaller_budget_takes_a_prefix(layer: Layer, quest: Quest, rows: int, fewer: int) -> None:
    if quest.rule is PageRule.EVALUATION:
        quest = replace(quest, rule=PageRule.PAPER)
    _, large = choose_last(quest, layer.context(rows), layer)
    _, small = choose_last(quest, layer.context(max(1, rows - fewer)), layer)
    filled = torch.full_like(large.units, NO_UNIT)
    filled[:, : small.units.shape[1]] = small.units
    assert bool(((filled == large.units) | (filled == NO_UNIT)).all())


def test_a_valid_bound_can_miss_the_best_row() -> None:
    """Corners of the first two pages' boxes score 2, though no row of theirs scores above 1; the third holds 1.5."""
    rows = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.75, 0.75], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    k = torch.tensor([rows])
    layer = Layer(torch.ones(1, 8, 2), k, torch.zeros_like(k))
    quest = Quest(page_size=2)
    index, one = choose_last(quest, layer.context(3), layer)  # a page of two rows beside the newest row
    assert index.bounds(layer.last_step().queries).tolist() == [[2.0, 2.0, 1.5, 0.0]]
    assert one.units.tolist() == [[0]]  # and a tie goes to the lower page
    _, two = choose_last(quest, layer.context(5), layer)
    assert two.units.tolist() == [[0, 1]]
    _, three = choose_last(quest, layer.context(7), layer)
    assert three.units.tolist() == [[0, 1, 2]]


def test_sharing_makes_one_choice_for_a_group() -> None:
    """Page 0 is best for one head alone, page 1 second for both, page 2 best for the other head by a little."""
    k = torch.tensor([[[9.0, 0.0], [8.0, 8.0], [0.0, 8.5], [0.0, 0.0]]])
    q = torch.zeros(2, 4, 2)
    q[0, -1], q[1, -1] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    layer = Layer(q, k, torch.zeros_like(k))

    def best(sharing: GroupSharing) -> list[list[int]]:
        _, selection = choose_last(Quest(page_size=1, sharing=sharing), layer.context(2), layer)
        return selection.units.tolist()

    assert best(GroupSharing.SEPARATE) == [[0], [2]]
    assert best(GroupSharing.MAX) == [[0]]
    assert best(GroupSharing.SUM) == best(GroupSharing.MEAN) == best(GroupSharing.SOFTMAX_SUM) == [[1]]
    assert Quest(sharing=GroupSharing.MAX).owner is Owner.KV_HEAD


def test_threshold_is_in_scaled_scores() -> None:
    k = torch.tensor([[[8.0] * 4, [7.0] * 4, [5.0] * 4, [0.0] * 4]])  # scaled scores 16, 14, 10 for a query of ones
    layer = Layer(torch.ones(1, 4, 4), k, torch.zeros_like(k))
    for margin, pages in ((0.0, [0]), (1.9, [0]), (2.0, [0, 1]), (6.0, [0, 1, 2])):
        _, selection = choose_last(Quest(page_size=1), layer.context(Threshold(margin, cap=4)), layer)
        assert selection.units.tolist() == [pages]
        assert not selection.capped
    _, selection = choose_last(Quest(page_size=1), layer.context(Threshold(6.0, cap=3)), layer)
    assert selection.units.tolist() == [[0, 1]]
    assert selection.capped


def test_estimate_weighs_each_page_as_if_all_its_rows_reached_the_bound() -> None:
    layer = Layer.random(37, spread=1.0)
    index, selection = choose_last(Quest(page_size=8), layer.context(17), layer)  # two pages of five
    weights = torch.exp(index.bounds(layer.last_step().queries) * layer.geometry.scale)
    rows, offered = torch.tensor([8, 8, 8, 8, 5]), torch.tensor([8, 8, 8, 8, 4])
    assert selection.estimate is not None
    for head in range(4):
        omitted = offered.float() * weights[head]
        omitted[selection.units[head][selection.units[head] != NO_UNIT]] = 0
        expected = omitted.sum() / (weights[head] * rows).sum()
        torch.testing.assert_close(selection.estimate[head], expected, rtol=1e-4, atol=1e-6)


def test_estimated_mass_counts_the_rows_of_a_page() -> None:
    """The same bound for a page of two rows to offer and one of eight: the first is a fifth of the mass of both."""
    k = torch.zeros(1, 17, 4)
    layer = Layer(torch.ones(1, 17, 4), k, k)
    ctx = layer.context(EstimatedMass(0.19, cap=17), sinks=6)
    _, selection = choose_last(Quest(page_size=8), ctx, layer)
    assert selection.units.tolist() == [[0]]
    _, selection = choose_last(Quest(page_size=8), layer.context(EstimatedMass(0.21, cap=17), sinks=6), layer)
    assert selection.units.tolist() == [[0, 1]]


@pytest.mark.parametrize("rule", PageRule)
def test_nothing_is_chosen_from_an_empty_region(rule: PageRule) -> None:
    layer = Layer.random(20)
    for sinks, recent in ((0, 20), (4, 64), (19, 1)):
        _, selection = choose_last(Quest(rule=rule), layer.context(64, sinks=sinks, recent=recent), layer)
        assert selection.units.shape == (4, 0)
        assert selection.candidates == 0
        assert selection.estimate is not None
        assert selection.estimate.tolist() == [0.0] * 4


def test_one_row_is_one_page() -> None:
    layer = Layer.random(1)
    index, selection = choose_last(Quest(), layer.context(1), layer)
    assert index.pages == 1
    assert selection.units.shape == (4, 0)


def test_queries_need_not_lie_together() -> None:
    layer = Layer.random(50)
    step = layer.last_step(3)
    spread = StepRows(step.start, step.queries.transpose(0, 1).contiguous().transpose(0, 1), step.keys, step.values)
    index = Quest().build(layer.context(30), 0, None)
    assert not spread.queries.is_contiguous()
    assert torch.equal(index.bounds(spread.queries), index.bounds(step.queries.contiguous()))


def test_extrema_are_kept_in_the_dtype_of_the_keys() -> None:
    layer = Layer.random(70, dtype=torch.bfloat16)
    index = Quest().build(layer.context(1), 0, None)
    assert isinstance(index, PageExtrema)
    assert index.low.dtype is torch.bfloat16
    assert index.bounds(layer.last_step().queries).dtype is torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 0}, "Quest.page_size must be a whole number of at least 1, got 0"),
        ({"page_size": True}, "Quest.page_size"),
        ({"page_size": 16.0}, "Quest.page_size"),
        ({"dense_layers": -1}, "Quest.dense_layers must be a whole number of at least 0, got -1"),
        ({"sharing": GroupSharing.QUERY_SUM}, "Quest.sharing"),
        ({"sharing": "max"}, "Quest.sharing must be one of GroupSharing.SEPARATE.*got 'max'"),
        ({"rule": "runtime"}, "Quest.rule must be one of PageRule.PAPER"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Quest(**settings)  # type: ignore[arg-type]


def test_lineage_follows_the_configuration() -> None:
    digests = {Quest().digest, Quest(page_size=32).digest, Quest(rule=PageRule.RUNTIME).digest}
    assert len(digests) == 3
    assert Quest().digest == Quest(page_size=16).digest
    assert Quest().dense_layers == 2
