"""InfiniGen in a live model: rows are chosen a layer ahead, and receipts say how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach
from tiny_models import tiny_model

from kvstrata.contract.budget import Fraction, Persistent
from kvstrata.contract.method import QueryVariant
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.methods.infinigen import InfiniGen, InfiniGenFromKeys

PROMPT = 3 * CHUNK + 7


def _choosing(model: Any, path: Path, method: InfiniGen) -> Any:
    return attach(
        model,
        path,
        method=method,
        mode="approximate",
        budget=Fraction(0.5),
        persistent=Persistent(sinks=2, recent=9),
        min_history=8,
    )


def _ids(tokens: int) -> list[int]:
    return torch.randint(1, 190, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def _decode(model: Any, request: Any, ids: list[int]) -> list[Any]:
    """One step for each token; the layers of each step's receipt."""
    steps = []
    with torch.no_grad():
        for token in ids:
            model(torch.tensor([[token]]), **request.generate_kwargs())
            (receipt,) = request.last_step.selections
            steps.append(receipt.layers)
    return steps


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_rows_are_predicted_from_the_layer_before(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), _ids(PROMPT + 4)
    with _choosing(model, tmp_path, InfiniGen(dense_layers=1)) as memory:
        request = memory.request()
        with torch.no_grad():
            model(torch.tensor([ids[:PROMPT]]), **request.generate_kwargs())
        steps = _decode(model, request, ids[PROMPT:])
    assert {layer.outcome for layer in steps[0][1:]} == {LayerOutcome.BUILDING}
    for layers in steps[1:]:
        assert layers[0].outcome is LayerOutcome.DENSE
        for layer in layers[1:]:
            assert layer.outcome is LayerOutcome.SELECTED
            assert layer.variant is QueryVariant.PREDICTED
            assert layer.detail.startswith(f"layer {layer.layer}, predicted query, ")
            assert layer.index_bytes > 0
            assert layer.times.speculate > 0
            assert layer.estimate is not None


@pytest.mark.parametrize(
    ("method", "outcome"), [(InfiniGen, LayerOutcome.MISSING), (InfiniGenFromKeys, LayerOutcome.BUILDING)]
)
def test_restored_histories_have_no_queries_to_make_a_basis_from(
    method: type[InfiniGen], outcome: LayerOutcome, tmp_path: Path
) -> None:
    model, ids = tiny_model("llama"), _ids(PROMPT + 3)
    with attach(model, tmp_path) as memory:
        request = memory.request()
        with torch.no_grad():
            model(torch.tensor([ids[:PROMPT]]), **request.generate_kwargs())
        memory.save("history", request)
    with _choosing(model, tmp_path, method(dense_layers=1)) as memory:
        request, receipt = memory.restore("history", ids[: PROMPT + 1])
        assert receipt.restored_tokens == PROMPT
        steps = _decode(model, request, ids[PROMPT:])
    assert {layer.outcome for layer in steps[0][1:]} == {outcome}
    later = LayerOutcome.MISSING if outcome is LayerOutcome.MISSING else LayerOutcome.SELECTED
    assert {layer.outcome for layer in steps[-1][1:]} == {later}
