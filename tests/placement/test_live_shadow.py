"""Sampled selections against dense attention: when, what is measured, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_choice import FixedChoice
from selection_parts import Layer, attend, choose_last, support_mask, support_of
from torch import Tensor

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.contract.method import Owner
from kvstrata.errors import ConfigurationError
from kvstrata.methods.calibration import budget_key
from kvstrata.methods.quest import Quest
from kvstrata.methods.selection import NO_UNIT
from kvstrata.placement.live_shadow import LiveShadow
from kvstrata.placement.method_context import FrameContext
from kvstrata.placement.policy import SelectionPolicy
from kvstrata.placement.shadow_fixture import read_fixture
from kvstrata.placement.support_attention import ChosenRows

KEEP = Persistent(sinks=2, recent=3)


def context_of(layer: Layer, method: Any, rows: int = 1, budget: int = 16) -> FrameContext:
    policy = SelectionPolicy(method, Rows(budget), KEEP)
    context = FrameContext(policy, layer.geometry, None, None, None)  # type: ignore[arg-type]
    context.begin_step(layer.tokens - rows, rows)
    context.enter(0)
    return context


def compare(
    shadow: LiveShadow, layer: Layer, method: Any, rows: int = 1, widen: float | None = None, number: int = 0
) -> tuple[Any, Tensor]:
    """What the shadow says of the selection for the last rows, and the rows that entered."""
    context = context_of(layer, method, rows)
    if widen is not None:
        context.widen(widen)
    memory = layer.context(context.budget, sinks=KEEP.sinks, recent=KEEP.recent)
    index, selection = choose_last(method, memory, layer, rows)
    support = support_of(method, index, selection, memory)
    step = layer.last_step(rows)
    output = attend(layer, support, step).transpose(0, 1)
    dense = layer.k, layer.v
    rows_of_kv = support.rows.expand(layer.geometry.kv_heads, -1) if support.rows.shape[0] == 1 else support.rows
    each = torch.arange(rows_of_kv.shape[0]) // (rows_of_kv.shape[0] // layer.geometry.kv_heads)
    place = each.unsqueeze(-1), rows_of_kv.clamp_min(0)
    parts = [ChosenRows(layer.k[place], layer.v[place], rows_of_kv != NO_UNIT)]
    sample = shadow.compare(method, index, context, number, step, dense, None, selection, support, output, parts)
    return sample, support_mask(support, layer.geometry)


@pytest.mark.parametrize("of", list(Owner))
def test_measures_are_those_of_dense_attention(of: Owner) -> None:
    layer = Layer.random(60, seed=3)
    shadow = LiveShadow()
    sample, inside = compare(shadow, layer, FixedChoice(of=of))
    weights = layer.dense(layer.last_step())[:, 0]
    omitted = weights.masked_fill(inside, 0.0).sum(-1)
    assert sample.omitted == pytest.approx(float(omitted.mean()))
    assert sample.most_omitted == pytest.approx(float(omitted.max()))
    dense = layer.dense_output(layer.last_step())[:, 0]
    kept = weights.masked_fill(~inside, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    chosen = torch.einsum("hn,hnd->hd", kept, layer.v.double().repeat_interleave(layer.geometry.group, 0))
    error = (chosen - dense).norm(dim=-1)
    assert sample.error == pytest.approx(float(error.mean()), rel=1e-4)
    assert sample.dense_norm == pytest.approx(float(dense.norm(dim=-1).mean()))
    assert sample.relative_error == pytest.approx(float((error / dense.norm(dim=-1)).mean()), rel=1e-4)
    longest = layer.v.double().norm(dim=-1).amax(-1).repeat_interleave(layer.geometry.group)
    assert sample.bound == pytest.approx(float((2 * omitted * longest).mean()))
    count = inside.sum(-1)
    recall = [
        len(set(weights[head].topk(int(count[head])).indices.tolist()) & set(inside[head].nonzero().flatten().tolist()))
        / int(count[head])
        for head in range(len(count))
    ]
    assert sample.recall == pytest.approx(sum(recall) / len(recall))
    assert shadow.results == [(59, 0, sample)]


def test_samples_carry_the_estimate_and_the_budget_that_it_was_made_under() -> None:
    layer, method = Layer.random(80), Quest(page_size=4)
    shadow = LiveShadow()
    first, _ = compare(shadow, layer, method, number=2)
    wider, _ = compare(shadow, layer, method, widen=2.0)
    compare(shadow, layer, FixedChoice())
    assert [sample.budget for sample in shadow.samples] == [
        budget_key(Rows(16)),
        budget_key(Rows(32)),
        budget_key(Rows(16)),
    ]
    assert [sample.omitted for sample in shadow.samples[:2]] == [first.most_omitted, wider.most_omitted]
    assert shadow.samples[0].raw > shadow.samples[1].raw > 0  # type: ignore[operator]
    assert shadow.samples[2].raw is None, "a method without an opinion"
    assert [sample.layer for sample in shadow.samples] == [2, 0, 0]


def test_it_looks_at_every_so_many_positions_and_at_the_layers_it_was_told() -> None:
    shadow = LiveShadow(every=4, layers=[1, 3])
    wanted = [(layer, position) for layer in range(5) for position in range(9) if shadow.wants(layer, position)]
    assert wanted == [(layer, position) for layer in (1, 3) for position in (0, 4, 8)]
    assert LiveShadow(every=1).wants(7, 3)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_below_one_is_refused(every: Any) -> None:
    with pytest.raises(ConfigurationError, match="every"):
        LiveShadow(every=every)


def test_what_is_dumped_can_be_measured_again(tmp_path: Path) -> None:
    shadow = LiveShadow(dump=tmp_path / "new" / "folder")
    layer = Layer.random(60, kv_heads=2, group=3)
    samples = [compare(shadow, layer, FixedChoice(step=step), number=step)[0] for step in (3, 3, 5)]
    files = sorted((tmp_path / "new" / "folder").iterdir())
    assert [path.name for path in files] == [
        "000001-fixed-layer3-position59.json",
        "000002-fixed-layer3-position59.json",
        "000003-fixed-layer5-position59.json",
    ], "samples of two requests at one position do not replace each other"
    for path, sample in zip(files, samples, strict=True):
        _, measures = read_fixture(path)
        means = measures.means()
        assert means["omitted"] == pytest.approx(sample.omitted)
        assert means["recall"] == sample.recall
        assert means["error"] == pytest.approx(sample.error)
        assert means["bound"] == pytest.approx(sample.bound)
        assert float(measures.omitted.max()) == pytest.approx(sample.most_omitted)


def test_a_step_of_several_rows_is_measured_and_not_dumped(tmp_path: Path) -> None:
    layer, shadow = Layer.random(60), LiveShadow(dump=tmp_path / "dump")
    context = context_of(layer, FixedChoice(), rows=4)
    memory = layer.context(Rows(16), sinks=KEEP.sinks, recent=KEEP.recent)
    index, selection = choose_last(FixedChoice(), memory, layer)
    support = replace(support_of(FixedChoice(), index, selection, memory), recent=60 - 4 - KEEP.recent + 1)
    step = layer.last_step(4)
    output = torch.zeros(4, layer.geometry.query_heads, layer.geometry.head_dim)
    sample = shadow.compare(
        FixedChoice(), index, context, 0, step, (layer.k, layer.v), None, selection, support, output, []
    )
    assert 0 < sample.omitted <= sample.most_omitted <= 1
    assert not (tmp_path / "dump").exists()
