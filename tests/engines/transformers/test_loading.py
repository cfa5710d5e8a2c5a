"""A loaded model is the right one, in the right dtype, with a tokenizer that can chat."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstrata.contract.identity import ModelIdentity
from kvstrata.engines.transformers.loading import DTYPES, load_model
from kvstrata.engines.transformers.model_sources import prepare_model
from kvstrata.errors import ConfigurationError, ModelLoadError, Reason


@pytest.fixture
def directory(tiny_llama: Callable[..., Any], smollm2_path: Path, tmp_path: Path) -> Path:
    from transformers import AutoTokenizer

    path = tmp_path / "model"
    tiny_llama(vocabulary=49152).save_pretrained(path)
    AutoTokenizer.from_pretrained(smollm2_path).save_pretrained(path)
    return path


def test_bundled_model_answers(smollm2: Callable[..., Any]) -> None:
    loaded = smollm2("float32")
    config = loaded.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.max_position_embeddings == 8192
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
    reply = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in loaded.tokenizer.decode(reply)


def test_bundled_weights_are_the_dequantised_ones(smollm2: Callable[..., Any]) -> None:
    from gguf import GGUFReader, dequantize

    loaded = smollm2("float32")
    tensors = {tensor.name: tensor for tensor in GGUFReader(loaded.source).tensors}
    state = loaded.model.state_dict()
    for name, key in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
    ]:
        stored = dequantize(tensors[name].data, tensors[name].tensor_type)
        assert torch.equal(state[key], torch.from_numpy(stored.copy())), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_what_was_asked_for(directory: Path, tmp_path: Path, dtype: str) -> None:
    loaded = load_model(directory, dtype=dtype, cache_dir=tmp_path / "cache")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert not loaded.model.training


def test_identity_is_the_digest_or_the_given_name(directory: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert load_model(directory, cache_dir=cache).identity == ModelIdentity(prepare_model(directory).artefact)
    assert load_model(directory, cache_dir=cache, model_id="mine").identity == ModelIdentity("id:mine")


@pytest.mark.parametrize("dtype", ["int8", "torch.bfloat16", "", "bf16"])
def test_other_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigurationError, match="dtype is") as refused:
        load_model("smollm2", dtype=dtype)
    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_empty_model_id_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="model_id is empty"):
        load_model("smollm2", model_id=" ")


def test_truncated_weights_are_refused(directory: Path, tmp_path: Path) -> None:
    os.truncate(directory / "model.safetensors", 5000)
    with pytest.raises(ModelLoadError, match="cannot be loaded") as refused:
        load_model(directory, cache_dir=tmp_path / "cache")
    assert "fetch or save the model again" in refused.value.next_step


def test_weights_that_would_be_made_up_are_refused(directory: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(directory, cache_dir=tmp_path / "cache")


def test_progress_bars_are_left_as_they_were(directory: Path, tmp_path: Path) -> None:
    from transformers.utils import logging

    for shown in (True, False):
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
        load_model(directory, cache_dir=tmp_path / "cache")
        assert logging.is_progress_bar_enabled() is shown
    logging.enable_progress_bar()
