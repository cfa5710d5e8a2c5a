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
from kvstrata.lab.prose import reading_task

PUBLISHED_GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


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


@pytest.mark.slow
def test_gemma_is_the_published_model_and_continues_text() -> None:
    """Needs its package, and its terms accepted in the environment."""
    try:
        loaded = load_model("gemma3-270m", dtype="float32")
    except ModelLoadError as refused:
        pytest.skip(str(refused))
    config = loaded.model.config
    assert {name: getattr(config, name) for name in PUBLISHED_GEMMA} == PUBLISHED_GEMMA
    assert config.rope_parameters["full_attention"] == {"rope_type": "default", "rope_theta": 1e6}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert loaded.tokenizer.chat_template is None
    tokens = loaded.tokenizer("Hello  world\n\n\tna\u00efve").input_ids
    expected = ["<bos>", "Hello", "\u2581\u2581", "world", "\n\n", "\t", "na", "\u00ef", "ve"]
    assert loaded.tokenizer.convert_ids_to_tokens(tokens) == expected
    assert len(reading_task(loaded.tokenizer, 12_000).prompt_ids) == 12_000
    question = "Question: What is the largest planet of the solar system?\nAnswer:"
    for text, continuation in (("1, 2, 3, 4, 5,", " 6, 7, 8"), (question, " Jupiter")):
        ids = loaded.tokenizer(text, return_tensors="pt").input_ids
        out = loaded.model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert loaded.tokenizer.decode(out).startswith(continuation)


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
