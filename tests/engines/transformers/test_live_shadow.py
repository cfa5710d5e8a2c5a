"""The dense shadow beside real requests: right measures, an answer that stays as it is, and samples that calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, budget_of
from fixed_choice import FixedChoice
from gate_cases import BUDGET, KEEP, PROMPT, QUEST, STEPS, choosing, prompt, run
from tiny_models import tiny_model
from transformers import DynamicCache

from kvstrata.contract.budget import Fraction
from kvstrata.contract.method import Owner
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.methods.calibration import budget_key, calibrate
from kvstrata.placement.live_shadow import LiveShadow
from kvstrata.placement.shadow import DenseReference
from kvstrata.placement.shadow_fixture import read_fixture


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def inside(method: FixedChoice, heads: int, kv_heads: int, visible: int) -> torch.Tensor:
    """Rows that the frame lets in, bool [query_heads, 1, visible]."""
    mask = torch.zeros(heads, 1, visible, dtype=torch.bool)
    sinks, recent = KEEP.bounds(visible)
    for head in range(heads):
        owner = {Owner.QUERY_HEAD: head, Owner.KV_HEAD: head * kv_heads // heads, Owner.LAYER: 0}[method.of]
        for unit in method.units(owner, visible - 1):
            mask[head, 0, unit * method.unit : min(visible - 0, (unit + 1) * method.unit)] = True
    mask[:, :, :sinks] = True
    mask[:, :, recent:] = True
    return mask


@pytest.mark.parametrize("of", list(Owner))
def test_measures_are_those_over_stock_keys(model: Any, tmp_path: Path, of: Owner) -> None:
    method, ids = FixedChoice(of=of, step=3, unit=2), prompt(200)
    shadow = LiveShadow(every=1, layers=[0])
    with choosing(model, tmp_path, method, budget=Fraction(0.9)) as memory:
        _, request, _ = run(memory, ids, shadow=shadow)
        tokens = torch.tensor([request.token_ids])
        view = memory.selections._view
        assert view is not None
        # The first layer's rows depend on no other layer: they are the stock model's, whatever was chosen before.
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), memory.stock():
            model(tokens, past_key_values=cache)
            hidden = view.input_norm(0, model.get_input_embeddings()(tokens)[0])
            queries = view.rotate(0, view.project(0, hidden)[0], torch.arange(tokens.shape[1]))
    assert [position for position, _, _ in shadow.results] == [200, 201, 202, 203]
    keys, values = cache.layers[0].keys[0], cache.layers[0].values[0]
    for position, layer, sample in shadow.results:
        assert layer == 0
        visible = position + 1
        dense = DenseReference.of(queries[:, position:visible], keys[:, :visible], values[:, :visible], view.scale)
        mask = inside(method, view.query_heads, view.kv_heads, visible)
        expected = dense.measure_rows(mask, torch.zeros(view.query_heads, 1, view.head_dim))
        assert sample.recall == pytest.approx(float(expected.recall.mean()))
        assert sample.omitted == pytest.approx(float(expected.omitted.mean()), abs=1e-5)
        assert sample.most_omitted == pytest.approx(float(expected.omitted.max()), abs=1e-5)
        assert sample.dense_norm == pytest.approx(float(expected.dense_norm.mean()), rel=1e-4)
        assert sample.bound == pytest.approx(float(expected.bound.mean()), rel=1e-4)
        assert sample.error == pytest.approx(float(expected.support_error.mean()), rel=1e-3), "the rows are exact"
        assert sample.error <= sample.bound


def test_sampled_steps_answer_as_if_nobody_looked(model: Any, tmp_path: Path) -> None:
    segment_slots = 4 + 3 + 8 * 2
    limits = {"memory_budget": budget_of(model, segment_slots, prefill=CHUNK), "prefill_chunk": CHUNK}
    with choosing(model, tmp_path, **limits) as memory:
        plain, request, unseen = run(memory, prompt())
        request.close()
        shadow = LiveShadow(every=2)
        logits, request, seen = run(memory, prompt(), shadow=shadow)
        assert torch.equal(logits, plain)
        sampled = [step.start for step in seen.steps if step.selections[0].layers[0].shadow is not None]
        assert sampled == [start for start in range(PROMPT, PROMPT + STEPS - 1) if start % 2 == 0]
        for one, other in zip(unseen.steps, seen.steps, strict=True):
            reads = [[layer.read_bytes for layer in step.selections[0].layers] for step in (one, other)]
            assert reads[0] == reads[1], "what the shadow reads is not the selection's"
        assert any(layer.read_bytes for layer in seen.steps[-1].selections[0].layers)


def test_only_steps_that_left_rows_out_are_sampled(model: Any, tmp_path: Path) -> None:
    shadow = LiveShadow(every=1)
    with choosing(model, tmp_path, dense_layers=[1]) as memory:
        _, _, recorder = run(memory, prompt(), shadow=shadow)
        assert recorder.outcomes[0] == {LayerOutcome.BUILDING, LayerOutcome.DENSE}
    assert {(position, layer) for position, layer, _ in shadow.results} == {
        (position, layer) for position in range(PROMPT, PROMPT + STEPS - 1) for layer in (0, 2)
    }


def test_sequences_of_a_batch_are_all_looked_at(model: Any, tmp_path: Path) -> None:
    shadow = LiveShadow(every=1, dump=tmp_path / "dump")
    both = torch.cat([prompt(200), prompt(200, seed=4)])
    with choosing(model, tmp_path / "store") as memory:
        _, request, _ = run(memory, both, tokens=3, shadow=shadow)
        layers = len(request.last_step.selections[0].layers)
    assert len(shadow.results) == 2 * 2 * layers
    files = sorted((tmp_path / "dump").iterdir())
    assert len(files) == len(shadow.results)
    for path, (position, layer, sample) in zip(files, shadow.results, strict=True):
        data, measures = read_fixture(path)
        assert (data["position"], data["layer"], data["method"]) == (position, layer, "quest")
        means = measures.means()
        for name in ("recall", "omitted", "error", "relative_error", "dense_norm", "bound"):
            assert means[name] == pytest.approx(getattr(sample, name), rel=1e-6, abs=1e-9)


def test_samples_make_a_calibration_that_holds_for_them(model: Any, tmp_path: Path) -> None:
    shadow = LiveShadow(every=1)
    with choosing(model, tmp_path) as memory:
        run(memory, prompt(), tokens=40, shadow=shadow)
        found = calibrate(QUEST, memory.context, shadow.samples, confidence=0.8)
        found.require(QUEST, memory.context)
    assert len(shadow.samples) == 39 * 3
    assert {sample.budget for sample in shadow.samples} == {budget_key(BUDGET)}
    bounds = [found.estimate(sample.raw, sample.budget, sample.layer).omitted for sample in shadow.samples]
    held = sum(sample.omitted <= bound for sample, bound in zip(shadow.samples, bounds, strict=True))
    assert held >= 0.8 * len(bounds)
    assert min(bounds) < 1
