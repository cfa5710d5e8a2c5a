"""Rows that agree with a prompt are kept, all others computed, and the answer is that of a fresh request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import CHUNK, attach
from tiny_chat_model import CONTEXT, write_tiny_chat_model

from kvstrata.engines.transformers import LoadedModel, load_model
from kvstrata.engines.transformers.generation import Answer, Sampling, continue_text
from kvstrata.errors import ConfigurationError, Reason

SHARED = 3 * CHUNK + 10
FIRST = [3 + n % 200 for n in range(SHARED + 100)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_chat_model(tmp_path_factory.mktemp("model"), layers=2), dtype="float32")


def _continue(memory: Any, request: Any, loaded: LoadedModel, ids: list[int], **options: Any) -> Answer:
    return continue_text(memory, request, loaded.tokenizer, ids, **({"max_new_tokens": 4} | options))


@pytest.mark.parametrize(
    ("common", "kept"),
    [
        (SHARED, 3 * CHUNK),  # the rows lie in sealed chunks: cut at a boundary
        (len(FIRST) - 3, len(FIRST) - 3),  # they lie in the open tail: cut anywhere
        (0, 0),
    ],
)
def test_a_request_is_cut_back_to_the_common_part(loaded: LoadedModel, tmp_path: Path, common: int, kept: int) -> None:
    second = FIRST[:common] + [250] * (len(FIRST) - common)
    sealed = len(FIRST) // CHUNK * CHUNK
    assert kept % CHUNK == 0 or kept >= sealed
    with attach(loaded, tmp_path / "store") as memory:
        fresh = _continue(memory, memory.request(), loaded, second)
        request = memory.request()
        _continue(memory, request, loaded, FIRST)
        reused = _continue(memory, request, loaded, second)
    assert reused.kept_tokens == kept
    assert reused.tokens == fresh.tokens


def test_pieces_make_the_text_and_the_last_prompt_token_is_computed(loaded: LoadedModel, tmp_path: Path) -> None:
    pieces: list[str] = []
    with attach(loaded, tmp_path / "store") as memory:
        request = memory.request()
        first = _continue(memory, request, loaded, FIRST, on_text=pieces.append)
        again = _continue(memory, request, loaded, FIRST)
    assert "".join(pieces) == first.text
    assert again.kept_tokens == len(FIRST) - 1
    assert again.tokens == first.tokens


def test_sampling_leaves_the_callers_random_state_alone(loaded: LoadedModel, tmp_path: Path) -> None:
    import torch

    with attach(loaded, tmp_path / "store") as memory:
        before = torch.get_rng_state()
        _continue(memory, memory.request(), loaded, FIRST, sampling=Sampling(1.0, seed=3))
        assert torch.equal(torch.get_rng_state(), before)


def test_the_answer_ends_where_the_context_does(loaded: LoadedModel, tmp_path: Path) -> None:
    long = [7] * (CONTEXT - 2)
    with attach(loaded, tmp_path / "store", prefill_chunk=512) as memory:
        assert len(_continue(memory, memory.request(), loaded, long, max_new_tokens=50).tokens) <= 2
        with pytest.raises(ConfigurationError) as refused:
            _continue(memory, memory.request(), loaded, [7] * CONTEXT)
    assert refused.value.reason is Reason.CONTEXT_EXCEEDED


def test_prompts_and_settings_that_make_no_sense_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with attach(loaded, tmp_path / "store") as memory:
        request = memory.request()
        with pytest.raises(ConfigurationError, match="no tokens"):
            _continue(memory, request, loaded, [])
        with pytest.raises(ConfigurationError, match="max_new_tokens is 0"):
            _continue(memory, request, loaded, FIRST, max_new_tokens=0)
    with pytest.raises(ConfigurationError, match="temperature is -1"):
        Sampling(-1.0)
    with pytest.raises(ConfigurationError, match="seed is 18446744073709551616"):
        Sampling(seed=2**64)
