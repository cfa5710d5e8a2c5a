"""InfLLM in a live model: the attention that its page describes, for prompts in chunks, beyond the trained length."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import PREFILL, attach
from infllm_reference import Conversation
from tiny_models import tiny_model
from torch import Tensor

from kvstrata.contract.budget import Fraction, Persistent
from kvstrata.contract.method import Owner, QueryVariant
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.engines.transformers.families.view import TransformersView
from kvstrata.methods.infllm import InfLLM
from kvstrata.methods.infllm_index import RepresentativeRule

KEEP = Persistent(sinks=3, recent=70)
BUDGET = Fraction(0.8)
TOKENS = 2 * PREFILL + 5


@dataclass
class Recorded:
    """What the model did in one layer: residual stream and attention output of each step."""

    hidden: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


def record(model: Any) -> list[Recorded]:
    layers = [Recorded() for _ in model.model.layers]
    for layer, seen in zip(model.model.layers, layers, strict=True):
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.hidden.append(
                (args[0] if args else kwargs["hidden_states"])[0].clone()
            ),
            with_kwargs=True,
        )
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, seen=seen: seen.outputs.append(args[0][0].clone())
        )
    return layers


@pytest.mark.parametrize(
    ("owner", "rule", "reposition"),
    [
        (Owner.LAYER, RepresentativeRule.QUERIES, True),
        (Owner.LAYER, RepresentativeRule.QUERIES, False),
        (Owner.KV_HEAD, RepresentativeRule.KEYS, True),
        (Owner.QUERY_HEAD, RepresentativeRule.WEIGHTS, True),
        (Owner.QUERY_HEAD, RepresentativeRule.WEIGHTS, False),
    ],
)
def test_the_live_model_attends_as_the_reference(
    owner: Owner, rule: RepresentativeRule, reposition: bool, tmp_path: Path
) -> None:
    # The history is longer than the positions that the model knows.
    model = tiny_model("llama", max_position_embeddings=128)
    method = InfLLM(block_size=8, representatives=2, selection_owner=owner, rule=rule, reposition=reposition)
    ids = torch.randint(1, 190, (1, TOKENS + 3), generator=torch.Generator().manual_seed(1))
    layers = record(model)
    with attach(
        model,
        tmp_path,
        method=method,
        mode="approximate",
        budget=BUDGET,
        persistent=KEEP,
        min_history=8,
        memory_budget="64MiB",
    ) as memory:
        request = memory.request()
        with torch.no_grad():
            model(ids[:, :TOKENS], **request.generate_kwargs())
            for token in range(TOKENS, TOKENS + 3):
                model(ids[:, token : token + 1], **request.generate_kwargs())
        assert request.last_step is not None
        (receipt,) = request.last_step.selections
    assert {layer.outcome for layer in receipt.layers} == {LayerOutcome.SELECTED}
    assert receipt.variants == {QueryVariant.REPOSITIONED if reposition else QueryVariant.ACTUAL}
    view = TransformersView(model)
    for number, seen in enumerate(layers):
        normed = view.input_norm(number, torch.cat(seen.hidden))
        run = Conversation(method, *view.project(number, normed), BUDGET, KEEP)
        stop = 0
        selection = None
        for step, (hidden, output) in enumerate(zip(seen.hidden, seen.outputs, strict=True)):
            start, stop = stop, stop + hidden.shape[0]
            if step == 0:
                run.observe(stop)
                continue
            selection = run.step(stop)
            expected = run.attend(selection, start, stop).transpose(0, 1).flatten(1)
            torch.testing.assert_close(output, expected, rtol=2e-4, atol=2e-4)
        assert run.index is not None
        assert selection is not None
        left_out = stop - KEEP.recent - KEEP.sinks - (method.rows_of(run.index, selection.units) >= 0).sum(-1)
        assert left_out.min() > 0
