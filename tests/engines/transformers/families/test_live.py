"""What only the live modules tell is refused as well: foreign code, modes and places in which rows are different."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from tiny_models import FAMILY_NAMES, tiny_model
from transformers.models.llama import modeling_llama

from kvstrata.engines.transformers.families import family_of, refusals
from kvstrata.errors import Reason, UnsupportedError


def require_refused(model: Any, name: str, text: str) -> None:
    first = next(iter(refusals(model)))
    assert first.name == name
    assert text in first.cause
    with pytest.raises(UnsupportedError) as error:
        family_of(model)
    assert error.value.reason is Reason.MODEL_UNSUPPORTED
    assert (error.value.cause, error.value.next_step) == (first.cause, first.next_step)
    assert list(refusals(model.config)) == []


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_models_as_transformers_builds_them(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert list(refusals(tiny_model(name, dtype=dtype))) == []


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_an_attention_module_of_another_class(name: str) -> None:
    model = tiny_model(name)
    attention = family_of(model).attention_modules(model)[1]
    attention.__class__ = type("Patched", (type(attention),), {})
    require_refused(model, "foreign_module", "Patched, expected transformers.models.")


def test_remote_code_under_a_served_name() -> None:
    """A model that came with code of its own says model_type='llama' too."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.__class__ = type("LlamaDecoderLayer", (type(layer),), {"__module__": "transformers_modules.evil"})
    require_refused(model, "foreign_module", "transformers_modules.evil.LlamaDecoderLayer")


def test_a_forward_replaced_on_a_module() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[2].self_attn
    attention.forward = types.MethodType(lambda self, *args, **kwargs: None, attention)
    require_refused(model, "foreign_module", "the forward of LlamaAttention was replaced")


def test_a_forward_replaced_on_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda self, *args, **kwargs: None)
    require_refused(model, "foreign_module", "the forward of LlamaAttention was replaced")


def test_a_decoder_without_layers() -> None:
    model = tiny_model("llama")
    model.model = torch.nn.Identity()
    require_refused(model, "foreign_module", "no decoder layers")


def test_layers_taken_out_or_shared() -> None:
    fewer = tiny_model("llama")
    del fewer.model.layers[1]
    require_refused(fewer, "layers_disagree", "2 layers that count [0, 2], and num_hidden_layers=3")
    shared = tiny_model("llama")
    shared.model.layers[1] = shared.model.layers[0]
    require_refused(shared, "layers_disagree", "count [0, 0, 2]")


def test_an_attention_module_that_is_not_causal() -> None:
    model = tiny_model("qwen3")
    model.model.layers[0].self_attn.is_causal = False
    require_refused(model, "bidirectional_attention", "is_causal=False")


def test_training_mode() -> None:
    model = tiny_model("llama").train()
    require_refused(model, "training_mode", "training mode")
    assert list(refusals(model.eval())) == []


def test_several_devices() -> None:
    model = tiny_model("llama")
    model.lm_head = model.lm_head.to("meta")
    require_refused(model, "several_devices", "2 devices (cpu, meta)")


@pytest.mark.parametrize("places", [{"model": 0, "lm_head": "cpu"}, {"": "disk"}])
def test_a_device_map_that_offloads(places: dict[str, Any]) -> None:
    model = tiny_model("llama")
    model.hf_device_map = places
    require_refused(model, "offloaded", "device map")


def test_a_device_map_of_one_place() -> None:
    model = tiny_model("llama")
    model.hf_device_map = {"": "cpu"}
    assert list(refusals(model)) == []


def test_weights_that_a_hook_brings() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    accelerate.cpu_offload(model, execution_device="cpu")
    require_refused(model, "offloaded", "moved between devices by a hook")


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"quant_method": "gptq", "bits": 4}, False),
        ({"quant_method": "mxfp4"}, False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, True),
        ({"quant_method": "fbgemm_fp8"}, True),
        ({"quant_method": "unheard-of"}, True),
    ],
)
def test_quantisation_methods(settings: dict[str, Any], refused: bool) -> None:
    model = tiny_model("llama")
    model.config.quantization_config = settings
    if not refused:
        assert list(refusals(model)) == []
        return
    first = next(iter(refusals(model)))
    assert first.name == "quantised_activations"
    assert settings["quant_method"] in first.cause


def test_linear_modules_that_round_activations() -> None:
    """Their scale is that of all rows computed at once, so that a row depends on its neighbours."""
    model = tiny_model("llama")
    kind = type("Linear", (torch.nn.Linear,), {"__module__": "torch.ao.nn.quantized.dynamic.modules.linear"})
    model.model.layers[1].mlp.up_proj.__class__ = kind
    require_refused(model, "quantised_activations", "torch.ao.nn.quantized.dynamic")


def test_rotary_settings_changed_after_the_model_was_built() -> None:
    for name in ("llama", "gemma3", "gpt_oss"):
        model = tiny_model(name)
        rope = model.config.rope_parameters
        (rope["sliding_attention"] if name == "gemma3" else rope)["rope_theta"] = 12345.0
        require_refused(model, "frequencies_disagree", "not those of its rope_parameters")


def test_frequencies_changed_behind_the_configuration() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("llama", dtype=dtype)
        model.model.rotary_emb.inv_freq[3] *= 1.1
        require_refused(model, "frequencies_disagree", "not those of its rope_parameters")
    scaled = tiny_model("gpt_oss")
    scaled.model.rotary_emb.attention_scaling = 1.0
    require_refused(scaled, "frequencies_disagree", "not those of its rope_parameters")


def test_looking_changes_nothing() -> None:
    for name in FAMILY_NAMES:
        model = tiny_model(name)
        before = copy.deepcopy(model.config.to_dict())
        list(refusals(model))
        assert model.config.to_dict() == before
