"""Options of `generate` beside the modes: what is served equals the stock output, what is not is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import attach
from matrix_runs import generate, model_of, padded, stock_cache, tokens
from refusal_cases import REFUSED_CALLS
from tiny_models import tiny_model
from transformers import GenerationConfig

from kvstrata.errors import Reason, StateError, UnsupportedError

PROMPT = tokens(150, seed=3)


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 50},
        {"output_scores": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"output_hidden_states": True},
        {"num_beams": 3, "do_sample": True, "top_k": 20},
        {"num_beams": 2, "length_penalty": -1.0, "early_stopping": "never"},
        {"min_new_tokens": 6, "eos_token_id": list(range(2, 150))},
        {"bad_words_ids": [[token] for token in range(2, 100)]},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_that_are_served(tmp_path: Path, options: dict[str, Any]) -> None:
    model, batch = model_of("llama"), padded([PROMPT])
    torch.manual_seed(4)
    expected = generate(model, batch, stock_cache(model), 8, **options)
    with attach(model, tmp_path / "store") as memory:
        torch.manual_seed(4)
        ours = generate(model, batch, memory.generate_kwargs(), 8, **options)
    assert ours.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in zip(getattr(ours, "scores", None) or (), getattr(expected, "scores", None) or (), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    if "output_hidden_states" in options:
        for mine, theirs in zip(ours.hidden_states, expected.hidden_states, strict=True):
            for layer, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(layer[:, -1], other[:, -1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_calls_that_are_refused(tmp_path: Path, name: str) -> None:
    """By the reason that the page names, and the memory goes on serving."""
    case = REFUSED_CALLS[name]
    model, expected = (
        model_of("llama"),
        generate(model_of("llama"), padded([PROMPT]), stock_cache(model_of("llama")), 4),
    )
    with attach(model, tmp_path / "store") as memory:
        with pytest.raises(case.error, match=case.text) as refusal:
            case.call(model, memory)
        assert getattr(refusal.value, "reason", None) is case.reason
        ours = generate(model, padded([PROMPT]), memory.generate_kwargs(), 4)
    assert ours.sequences.tolist() == expected.sequences.tolist()


def test_quantised_caches_that_generate_makes(tmp_path: Path) -> None:
    """Without the package that rounds, Transformers says what is missing; with it, the cache is refused."""
    model = model_of("llama")
    with attach(model, tmp_path / "store") as memory:
        with pytest.raises((ImportError, UnsupportedError), match=r"(?i)quant"):
            model.generate(torch.tensor([PROMPT]), max_new_tokens=3, cache_implementation="quantized")
        assert memory.arena.used_slots == 0


def early_exits() -> list[Callable[..., Any]]:
    settings = GenerationConfig(assistant_early_exit=1, max_new_tokens=6, pad_token_id=0)
    return [
        lambda model, ids, **cache: model.generate(ids, assistant_early_exit=1, max_new_tokens=6, **cache),
        lambda model, ids, **cache: model.generate(ids, generation_config=settings, **cache),
        lambda model, ids, **cache: model.generate(ids, settings, **cache),
    ]


@pytest.mark.parametrize("call", early_exits())
def test_drafts_of_the_models_own_first_layers(tmp_path: Path, call: Callable[..., Any]) -> None:
    """Refused before the model is touched; where stock caches are let in, the answer is right."""
    model, ids = tiny_model("llama"), torch.tensor([PROMPT])
    expected = generate(model, padded([PROMPT]), stock_cache(model), 6).sequences.tolist()
    with attach(model, tmp_path / "store") as memory:
        with pytest.raises(UnsupportedError, match="assistant_early_exit") as refusal:
            call(model, ids, **memory.generate_kwargs())
        assert refusal.value.reason is Reason.OPERATION_UNSUPPORTED
        assert model.config.num_hidden_layers == 3
        with memory.stock():
            assert call(model, ids, **memory.generate_kwargs()).tolist() == expected
        assert memory.latest.token_ids == expected[0][:-1]


def test_a_model_that_lost_layers_while_attached(tmp_path: Path) -> None:
    """No row is committed that some layers have not seen."""
    model = tiny_model("llama")
    with attach(model, tmp_path / "store") as memory:
        request = memory.prefill(PROMPT)
        model.config.num_hidden_layers = 2
        with pytest.raises(StateError, match="2 of 3 layers"):
            model(torch.tensor([[5]]), past_key_values=request.cache)
        model.config.num_hidden_layers = 3
        assert request.token_ids == PROMPT[:-1]
        ours = generate(model, padded([PROMPT]), request.generate_kwargs(), 4).sequences.tolist()
    assert ours == generate(model, padded([PROMPT]), stock_cache(model), 4).sequences.tolist()
