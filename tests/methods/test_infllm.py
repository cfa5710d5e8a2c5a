from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infllm_reference import Conversation, rotary
from torch import Tensor

from kvstrata.contract.budget import EstimatedMass, Fraction, Persistent, Rows, SelectionBudget, Threshold
from kvstrata.contract.method import Owner, QueryVariant
from kvstrata.errors import ConfigurationError, Reason, StateError, UnsupportedError
from kvstrata.kernels.selected import selected_state
from kvstrata.methods import infllm_index
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.infllm import InfLLM
from kvstrata.methods.infllm_index import RepresentativeRule
from kvstrata.methods.influence import influence_of_queries
from kvstrata.methods.selection import NO_UNIT
from kvstrata.methods.unit_cache import UnitCachePolicy
from kvstrata.placement.expansion import expand

GOLDEN = Path(__file__).parents[1] / "golden" / "methods"
SMALL: dict[str, Any] = {"block_size": 8, "representatives": 2}
ALL = Fraction(1.0)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    with np.load(GOLDEN / "infllm.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


@pytest.fixture(scope="module")
def parameters() -> dict[str, int]:
    found: dict[str, int] = json.loads((GOLDEN / "infllm.json").read_text())["parameters"]
    return found


def test_the_codes_run_is_reproduced(
    golden: dict[str, Tensor], parameters: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    influence = []
    original = infllm_index.top_units
    monkeypatch.setattr(
        infllm_index, "top_units", lambda scores, count: influence.append(scores) or original(scores, count)
    )
    method = InfLLM(
        block_size=parameters["block_size"],
        representatives=parameters["repr_topk"],
        top_k=parameters["topk"],
        rule=RepresentativeRule.WEIGHTS,
        per_query_head=True,
    )
    persistent = Persistent(sinks=parameters["n_init"], recent=parameters["n_local"])
    # A budget that leaves out a little, so that no step counts as one that attends to everything.
    run = Conversation(method, golden["q"], golden["k"], golden["v"], Fraction(0.9), persistent)
    start, outputs = 0, []
    for step, length in enumerate(golden["step_lengths"].tolist()):
        stop = start + length
        if step == 0:
            run.observe(stop)
            outputs.append(golden["out"][:, :stop])
            start = stop
            continue
        selection = run.step(stop)
        index = run.index
        assert index is not None
        turned = selection.repositioned
        assert turned is not None
        torch.testing.assert_close(turned.query.mean(1), golden["step_query"][step], rtol=1e-4, atol=1e-5)
        if index.open:
            assert index.unit_keys is not None
            scores = (turned.query.mean(1).unsqueeze(1) * index.unit_keys[:, : index.open]).sum((0, 2))
            wanted = golden["unit_scores"][step, : index.open].float()
            # The code scores none where it takes all.
            kept = ~wanted.isnan()
            torch.testing.assert_close(scores[kept], wanted[kept], rtol=1e-4, atol=1e-5)
        units = sorted(unit for unit in selection.units[0].tolist() if unit < index.open)
        assert units == [unit for unit in golden["selected_units"][step].tolist() if unit != -1]
        outputs.append(run.attend(selection, start, stop, twice=True))
        start = stop
    index = run.index
    assert index is not None
    assert index.members is not None
    assert index.unit_keys is not None
    known = index.units
    assert known == 11
    starts = golden["unit_start"][:known]
    assert torch.equal(index.first + index.size * torch.arange(known), starts)
    assert torch.equal((index.members - starts.view(1, -1, 1)).transpose(0, 1), golden["repr_ids"][:known])
    torch.testing.assert_close(index.unit_keys.transpose(0, 1), golden["unit_keys"][:known], rtol=1e-4, atol=1e-5)
    got = torch.cat([part.view(4, -1, 8) for part in influence], dim=1).transpose(0, 1)
    torch.testing.assert_close(got, golden["repr_scores"][:known], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(outputs, dim=1), golden["out"], rtol=1e-3, atol=1e-4)


def test_the_papers_influence_is_reproduced(golden: dict[str, Tensor], parameters: dict[str, int]) -> None:
    local, tokens = parameters["n_local"], parameters["tokens"]
    whole = tokens - local
    got = influence_of_queries(golden["q"][:, 1:], golden["k"][:, :whole], local)
    wanted = golden["repr_scores_paper"][:, :whole]
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    method = InfLLM(per_query_head=True, **SMALL)
    persistent = Persistent(sinks=4, recent=local)
    index = Conversation(method, golden["q"], golden["k"], golden["v"], Rows(64), persistent).observe(tokens)
    assert index.members is not None
    units = index.units
    assert units == (tokens - local - 4) // 8
    best = wanted[:, 4 : 4 + 8 * units].reshape(4, units, 8).topk(2).indices.sort(-1).values
    assert torch.equal(index.members - 4 - 8 * torch.arange(units).view(1, -1, 1), best)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("owner", list(Owner))
def test_units_are_ranked_by_the_papers_sum(heads: tuple[int, int], per_head: bool, owner: Owner) -> None:
    method = InfLLM(block_size=5, representatives=3, top_k=2, per_query_head=per_head, selection_owner=owner)
    run = Conversation.random(method, 100, Rows(60), Persistent(2, 20), heads=heads, dim=8, seed=3)
    run.observe(93)
    selection = run.step(100)
    index = run.index
    assert index is not None
    assert index.members is not None
    assert selection.variant is QueryVariant.REPOSITIONED
    assert index.open == (94 - 20 - 2) // 5
    query = rotary(run.raw[0][:, 93:100], torch.full((7,), 19))
    group = heads[0] // heads[1]
    scores = torch.zeros(heads[0], index.open)
    for head in range(heads[0]):
        # Sum over queries and representatives of q . k, before it is shared.
        members = index.members[head if per_head else head // group, : index.open]
        keys = run.raw[1][head // group][members]
        scores[head] = torch.einsum("qd,urd->u", query[head], keys)
    owners = run.geometry.owners(owner)
    best = scores.view(owners, -1, index.open).sum(1).topk(2).indices
    rest = 94 - 20 - 2 - 5 * index.open
    assert rest == 2
    assert torch.equal(selection.units, torch.cat((torch.full((owners, 1), index.open), best), dim=1))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("owner", list(Owner))
def test_a_budget_of_all_rows_without_repositioning_is_exact(owner: Owner, rows: int) -> None:
    method = InfLLM(**SMALL, selection_owner=owner, reposition=False)
    run = Conversation.random(method, 90, ALL, Persistent(3, 20), seed=1)
    start = 90 - rows
    run.observe(start)
    selection = run.step(90)
    assert selection.variant is QueryVariant.ACTUAL
    assert selection.repositioned is None
    whole = run.attend(selection, start, 90)
    seen = torch.arange(90) <= torch.arange(start, 90).unsqueeze(1)
    if rows > 1:
        # Rows that leave the recent ones within the step are among those that the reference attends to.
        assert run.persistent.bounds(start + 1)[1] < 90 - 20
    exact = selected_state(
        run.queries[:, start:].contiguous(), run.keys, run.values, run.geometry.scale, seen.unsqueeze(0)
    )
    torch.testing.assert_close(whole, exact.output(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("owner", list(Owner))
def test_the_frames_expansion_of_all_rows_equals_exact_attention(owner: Owner) -> None:
    method = InfLLM(**SMALL, selection_owner=owner, reposition=False)
    run = Conversation.random(method, 70, ALL, Persistent(3, 20), seed=5)
    run.observe(69)
    selection = run.step(70)
    assert run.index is not None
    support = expand(method, run.index, selection, run.geometry, run.persistent, 70)
    assert support.counts.tolist() == [70] * run.geometry.owners(owner)
    heads = torch.arange(support.rows.shape[0]) * run.geometry.kv_heads // support.rows.shape[0]
    rows, owned = support.rows, heads
    if owner is Owner.LAYER:
        rows, owned = support.rows.expand(2, -1), torch.arange(2)
    persistent = [*range(support.sinks), *range(support.recent, 70)]
    state = selected_state(run.queries[:, 69:], run.keys[:, persistent], run.values[:, persistent], 0.25)
    keys, values = run.keys[owned.unsqueeze(-1), rows], run.values[owned.unsqueeze(-1), rows]
    state = state.merge(selected_state(run.queries[:, 69:], keys, values, 0.25, rows != NO_UNIT))
    exact = selected_state(run.queries[:, 69:], run.keys, run.values, 0.25)
    torch.testing.assert_close(state.output(), exact.output(), rtol=1e-4, atol=1e-5)


def test_a_budget_of_all_rows_puts_every_far_row_at_the_windows_edge() -> None:
    run = Conversation.random(InfLLM(**SMALL), 90, ALL, Persistent(3, 20), seed=2)
    run.observe(85)
    selection = run.step(90)
    got = run.attend(selection, 85, 90)
    far = rotary(run.raw[0][:, 85:], torch.full((5,), 19))
    position = torch.arange(85, 90).unsqueeze(1)
    other = torch.arange(90)
    recent = (other <= position) & (other > position - 20)
    near = selected_state(run.queries[:, 85:].contiguous(), run.keys, run.values, 0.25, recent.unsqueeze(0))
    distant = selected_state(far, run.raw[1], run.values, 0.25, (other <= position - 20).unsqueeze(0))
    torch.testing.assert_close(got, near.merge(distant).output(), rtol=1e-4, atol=1e-5)
    exact = selected_state(
        run.queries[:, 85:].contiguous(), run.keys, run.values, 0.25, (other <= position).unsqueeze(0)
    )
    assert (got - exact.output()).abs().max() > 0.01


def test_no_position_reaches_beyond_the_recent_rows() -> None:
    run = Conversation.random(InfLLM(**SMALL), 400, Rows(80), Persistent(4, 16), seed=8)
    run.observe(20)
    for stop in (*range(30, 400, 10), 391, 392):
        run.step(stop)
    assert run.view.positions == {15}


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9),
    sinks=st.integers(0, 5),
    recent=st.integers(1, 12),
    stops=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    rule=st.sampled_from(list(RepresentativeRule)),
    seed=st.integers(0, 100),
)
def test_every_unit_covers_its_rows_once(
    size: int, sinks: int, recent: int, stops: list[int], rule: RepresentativeRule, seed: int
) -> None:
    method = InfLLM(block_size=size, representatives=1 + seed % size, rule=rule)
    total = sum(stops)
    run = Conversation.random(method, total, Fraction(0.999), Persistent(sinks, recent), dim=4, seed=seed)
    run.observe(stops[0])
    stop = stops[0]
    for count in stops[1:]:
        selection = run.step(stop + count)
        first_recent = max(0, stop + 1 - recent)
        stop += count
        index = run.index
        assert index is not None
        rows = method.rows_of(index, torch.arange(index.open + 1).unsqueeze(0))[0]
        assert rows[rows != NO_UNIT].tolist() == list(range(sinks, first_recent))
        assert index.nbytes > 0
        named = method.rows_of(index, selection.units)
        assert int((named != NO_UNIT).sum()) <= max(0, run.budget.limit(stop))
        if index.members is not None:
            starts = sinks + size * torch.arange(index.units).view(1, -1, 1)
            inside = index.members - starts
            assert bool(((inside >= 0) & (inside < size)).all())
            assert bool((inside.diff(dim=-1) > 0).all())


@pytest.mark.parametrize("rule", [RepresentativeRule.QUERIES, RepresentativeRule.KEYS])
@pytest.mark.parametrize("reposition", [False, True])
def test_append_in_pieces_equals_append_in_one_go(rule: RepresentativeRule, reposition: bool) -> None:
    method = InfLLM(**SMALL, rule=rule, reposition=reposition)
    whole = Conversation.random(method, 700, Rows(100), Persistent(4, 24), seed=4).observe(700)
    run = Conversation.random(method, 700, Rows(100), Persistent(4, 24), seed=4)
    run.observe(50, 51, 120)
    for stop in (128, 300, 301, 302, 690, 700):
        run.step(stop)
    pieces = run.index
    assert pieces is not None
    assert pieces.members is not None
    assert whole.members is not None
    assert torch.equal(pieces.members, whole.members)
    assert pieces.unit_keys is not None
    assert whole.unit_keys is not None
    assert torch.equal(pieces.unit_keys, whole.unit_keys)
    assert torch.equal(pieces.keys.read(660, 700), whole.keys.read(660, 700))


def test_weights_depend_on_what_the_steps_attended_to() -> None:
    method = InfLLM(**SMALL, rule=RepresentativeRule.WEIGHTS)
    budget, persistent = Rows(40), Persistent(4, 24)
    whole = Conversation.random(method, 200, budget, persistent, seed=4).observe(200)
    pieces = Conversation.random(method, 200, budget, persistent, seed=4).observe(50, 51, 120, 200)
    assert whole.members is not None
    assert torch.equal(whole.members, pieces.members)
    selecting = Conversation.random(method, 200, budget, persistent, seed=4)
    selecting.observe(40)
    for stop in range(48, 201, 8):
        selecting.step(stop)
    assert selecting.index is not None
    assert selecting.index.units == whole.units
    assert not torch.equal(selecting.index.members, whole.members)


def test_weights_are_taken_once_when_a_search_is_widened_and_where_the_budget_covers_all() -> None:
    method = InfLLM(**SMALL, rule=RepresentativeRule.WEIGHTS)
    run = Conversation.random(method, 80, Rows(50), Persistent(4, 24), seed=6)
    run.observe(70)
    ctx, rows = run.append(80)
    index = run.index
    assert index is not None
    method.select(ctx, 0, index, rows)
    assert index.pending is not None
    before = index.pending.clone()
    ctx.budget = Rows(70)
    method.select(ctx, 0, index, rows)
    assert torch.equal(index.pending, before)
    covered = Conversation.random(method, 80, ALL, Persistent(4, 24), seed=6)
    covered.observe(70)
    covered.append(80)
    dense = Conversation.random(method, 80, ALL, Persistent(4, 24), seed=6).observe(80)
    assert covered.index is not None
    torch.testing.assert_close(covered.index.pending, dense.pending)


@pytest.mark.parametrize("reposition", [False, True])
def test_an_index_that_went_back_is_the_one_that_never_went_on(reposition: bool) -> None:
    method = InfLLM(**SMALL, reposition=reposition)
    run = Conversation.random(method, 300, Rows(100), Persistent(4, 24), seed=7)
    run.observe(150)
    run.step(180)
    assert run.index is not None
    back = method.truncate(run.index, 165)
    assert back is run.index
    assert back.frontier == 165
    fresh = Conversation.random(method, 300, Rows(100), Persistent(4, 24), seed=7)
    fresh.observe(165)
    for other in (run, fresh):
        other.step(200)
        other.step(201)
    assert fresh.index is not None
    assert torch.equal(run.index.members, fresh.index.members)
    assert torch.equal(run.index.unit_keys, fresh.index.unit_keys)


def test_an_index_cannot_go_back_to_where_its_evidence_is_gone() -> None:
    method = InfLLM(**SMALL)
    run = Conversation.random(method, 300, Rows(100), Persistent(4, 24))
    index = run.observe(300)
    assert method.truncate(index, 100) is None
    weights = InfLLM(**SMALL, rule=RepresentativeRule.WEIGHTS)
    index = Conversation.random(weights, 100, Rows(100), Persistent(4, 24)).observe(100)
    assert weights.truncate(index, 99) is None


def test_observation_begins_with_the_first_row_or_not_at_all() -> None:
    method = InfLLM(**SMALL)
    run = Conversation.random(method, 60, Rows(100), Persistent(4, 24))
    assert method.observe(run.context(10, 20), 0, None, run.rows(10, 20)) is None
    index = run.observe(30)
    assert method.observe(run.context(40, 50), 0, index, run.rows(40, 50)) is None
    again = method.observe(run.context(20, 30), 0, index, run.rows(20, 30))
    assert again is index
    assert again.frontier == 30
    assert method.build(run.context(20, 30), 0, again) is again
    with pytest.raises(StateError, match="saw the computation of 30 rows of 60 in layer 0"):
        method.build(run.context(50, 60), 0, again)
    with pytest.raises(StateError, match="saw the computation of 0 rows of 60"):
        method.build(run.context(50, 60), 0, None)
    with pytest.raises(StateError) as refused:
        method.append(run.context(50, 60), 0, again, run.rows(50, 60))
    assert refused.value.reason is Reason.STALE_FRONTIER


def test_keys_before_rotary_positions_need_a_model() -> None:
    run = Conversation.random(InfLLM(**SMALL), 20, Rows(100), Persistent(4, 8))
    ctx = InMemoryContext(run.geometry, {0: (run.keys, run.values)}, Rows(100), run.persistent, 20)
    with pytest.raises(UnsupportedError, match="need a live model") as refused:
        run.method.observe(ctx, 0, None, run.rows(0, 20))
    assert refused.value.next_step == "pass reposition=False"


@pytest.mark.parametrize("budget", [Rows(60), Fraction(0.4), Threshold(3.0, cap=60), EstimatedMass(0.7, cap=60)])
def test_no_budget_is_passed(budget: SelectionBudget) -> None:
    run = Conversation.random(InfLLM(**SMALL), 150, budget, Persistent(4, 24), seed=9)
    run.observe(149)
    selection = run.step(150)
    assert run.index is not None
    support = expand(run.method, run.index, selection, run.geometry, run.persistent, 150)
    assert 28 < int(support.counts[0]) <= 60
    assert selection.candidates == 15


def test_a_smaller_budget_chooses_a_prefix_and_the_unfinished_unit_comes_first() -> None:
    chosen = []
    for limit in (29, 30, 31, 38, 39, 61, 150):
        run = Conversation.random(InfLLM(**SMALL), 152, Rows(limit), Persistent(4, 24), seed=9)
        run.observe(151)
        chosen.append(run.step(152).units[0].tolist())
    # Unit 15 has rows 124 to 127 outside the recent ones: beside 28 persistent rows, 31 have no room for them.
    assert [len(units) for units in chosen] == [0, 0, 0, 1, 1, 4, 15]
    assert chosen[3] == [15]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(chosen))


def test_a_cap_that_cuts_is_told() -> None:
    run = Conversation.random(InfLLM(**SMALL), 150, Threshold(1e6, cap=60), Persistent(4, 24), seed=9)
    run.observe(149)
    assert run.step(150).capped


def test_ties_go_to_the_earlier_unit_and_row() -> None:
    method = InfLLM(**SMALL, top_k=2)
    zeros = torch.zeros(2, 100, 8)
    run = Conversation(method, zeros, zeros, zeros, Rows(60), Persistent(4, 24))
    run.observe(99)
    assert run.step(100).units.tolist() == [[0, 1]]
    assert run.index is not None
    assert run.index.members is not None
    assert run.index.members[0, :2].tolist() == [[4, 5], [12, 13]]


def test_nothing_is_chosen_of_nothing() -> None:
    run = Conversation.random(InfLLM(**SMALL), 12, Rows(100), Persistent(4, 24))
    run.observe(1)
    selection = run.step(2)
    assert selection.units.shape == (1, 0)
    assert selection.candidates == 0
    assert run.attend(selection, 1, 2).shape == (4, 1, 16)


def test_halves_and_broken_keys_choose_something() -> None:
    run = Conversation.random(InfLLM(**SMALL), 150, Rows(60), Persistent(4, 24), dtype=torch.bfloat16)
    run.raw[1][:, 30] = torch.nan
    run.raw[1][:, 50] = torch.inf
    run.observe(149)
    selection = run.step(150)
    assert run.index is not None
    assert run.index.keys.rows.dtype is torch.bfloat16
    units = selection.units[0].tolist()
    assert len(units) == len(set(units)) == 4
    assert run.index.unit_keys is not None
    assert bool(run.index.unit_keys.isfinite().all())
    run.raw[1][:] = torch.inf
    broken = Conversation(run.method, *run.raw, Rows(60), Persistent(4, 24))
    broken.observe(149)
    assert broken.step(150).units.tolist() == [[15, 0, 1, 2]]


def test_far_keys_are_counted() -> None:
    run = Conversation.random(InfLLM(**SMALL), 1000, Rows(100), Persistent(4, 24), dtype=torch.bfloat16)
    assert run.observe(1000).nbytes >= 1000 * 2 * 16 * 2
    light = Conversation.random(InfLLM(**SMALL, reposition=False), 1000, Rows(100), Persistent(4, 24))
    for stop in range(100, 1001, 100):
        light.observe(stop)
    assert light.index is not None
    assert light.index.nbytes < 1000 * 2 * 16 * 4


@pytest.mark.parametrize("policy", list(UnitCachePolicy))
def test_the_cache_counts_and_changes_nothing(policy: UnitCachePolicy) -> None:
    chosen = []
    for size in (1, 4, 64):
        method = InfLLM(**SMALL, cache_units=size, cache_policy=policy)
        run = Conversation.random(method, 200, Rows(60), Persistent(4, 24), seed=11)
        run.observe(150)
        units = []
        for stop in range(160, 201, 10):
            selection = run.step(stop)
            assert run.index is not None
            mass = torch.ones(4, selection.units.shape[1])
            method.feedback(run.context(stop - 10, stop), 0, run.index, selection, mass)
            units.append(selection.units.tolist())
            cache = run.index.caches[0]
            assert len(cache.resident) <= size
            assert all(unit < run.index.open for unit in cache.resident)
        finished = sum(len(step[0]) for step in units) - len(units)
        assert cache.hits + cache.misses == finished
        chosen.append(units)
    assert chosen[0] == chosen[1] == chosen[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "InfLLM.block_size must be a whole number of at least 1, got 0"),
        ({"representatives": 9, "block_size": 8}, "InfLLM.representatives must be at most block_size=8, got 9"),
        ({"top_k": 0}, "InfLLM.top_k must be"),
        ({"rule": "paper"}, "InfLLM.rule must be a RepresentativeRule, got 'paper'"),
        ({"selection_owner": "head"}, "InfLLM.selection_owner must be a Owner"),
        ({"cache_units": 0}, "UnitCache.capacity must be a whole number of at least 1, got 0"),
        ({"cache_decay": 1.5}, "UnitCache.decay must be from 0 to 1, got 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        InfLLM(**settings)


def test_the_digest_tells_configurations_apart() -> None:
    variants = [InfLLM(), InfLLM(top_k=16), InfLLM(rule=RepresentativeRule.WEIGHTS), InfLLM(reposition=False)]
    assert len({method.digest for method in variants}) == len(variants)
