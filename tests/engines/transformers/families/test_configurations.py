"""What is refused from a configuration alone: by its name, with the field that says so, for real configurations."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tiny_models import FAMILY_NAMES, tiny_config

from kvstrata.engines.transformers.families import FAMILIES, family_of, refusals
from kvstrata.errors import Reason, UnsupportedError

FOREIGN: list[tuple[str, dict[str, Any], str, str]] = [
    ("DeepseekV2Config", {}, "latent_attention", "kv_lora_rank=512"),
    ("DeepseekV3Config", {}, "latent_attention", "kv_lora_rank=512"),
    ("MiniCPM3Config", {}, "latent_attention", "latent row"),
    ("MambaConfig", {}, "hybrid_layers", "linear_attention"),
    ("JambaConfig", {}, "hybrid_layers", "linear_attention"),
    ("BambaConfig", {}, "hybrid_layers", "linear_attention"),
    ("Qwen3NextConfig", {}, "hybrid_layers", "linear_attention"),
    ("FalconH1Config", {}, "hybrid_layers", "hybrid"),
    ("Lfm2Config", {}, "hybrid_layers", "lfm2"),
    ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "hybrid_layers", "conv"),
    ("RwkvConfig", {}, "hybrid_layers", "rwkv"),
    ("T5Config", {}, "encoder_decoder", "is_encoder_decoder=True"),
    ("BartConfig", {}, "encoder_decoder", "is_encoder_decoder=True"),
    ("Gemma3Config", {}, "multimodal_wrapper", "text_config, vision_config"),
    ("LlavaConfig", {}, "multimodal_wrapper", "images or sound"),
    ("Gemma2Config", {}, "score_softcapping", "attn_logit_softcapping=50.0"),
    ("Llama4TextConfig", {}, "chunked_attention", "attention_chunk_size=8192"),
    ("Gemma3nTextConfig", {}, "shared_layers", "num_kv_shared_layers=15"),
    ("Gemma4TextConfig", {}, "layers_differ", "head_dim"),
    ("BloomConfig", {}, "alibi_positions", "ALiBi"),
    ("MptConfig", {}, "alibi_positions", "ALiBi"),
    ("FalconConfig", {"alibi": True}, "alibi_positions", "ALiBi"),
    ("GPT2Config", {}, "absolute_positions", "absolute embeddings"),
    ("OPTConfig", {}, "absolute_positions", "absolute embeddings"),
    ("GPTNeoConfig", {}, "absolute_positions", "absolute embeddings"),
    ("PhiConfig", {}, "unknown_family", "model_type='phi' is not served"),
    ("MixtralConfig", {}, "unknown_family", "families served: gemma3_text, gpt_neox, gpt_oss, llama"),
]

SETTINGS: list[tuple[str, dict[str, Any], str, str]] = [
    ("gemma3", {"use_bidirectional_attention": True}, "bidirectional_attention", "use_bidirectional_attention=True"),
    ("gemma3", {"attn_logit_softcapping": 30.0}, "score_softcapping", "attn_logit_softcapping=30.0"),
    ("gemma3", {"layer_types": ["sliding_attention", "chunked_attention"] * 2}, "chunked_attention", "own chunk"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "hybrid_layers", "linear"),
    ("llama", {"per_layer_config": {1: {"num_key_value_heads": 1}}}, "layers_differ", "num_key_value_heads"),
]

SET_LATER: list[tuple[str, str, Any, str, str]] = [
    ("llama", "is_causal", False, "bidirectional_attention", "is_causal=False"),
    ("llama", "num_key_value_heads", [2, 2, 1], "layers_differ", "num_key_value_heads"),
    ("llama", "num_key_value_heads", 3, "heads_disagree", "4 query heads cannot share 3"),
    ("llama", "sliding_window", 32, "window_not_read", "sliding_window=32 is set, which llama does not read"),
    ("mistral", "layer_types", ["full_attention"] * 3, "layer_types_not_read", "layer_types is set"),
    ("mistral", "sliding_window", 0, "window_invalid", "sliding_window=0"),
    ("qwen2-sliding", "sliding_window", None, "window_missing", "sliding_window is not set"),
    ("qwen2", "num_hidden_layers", 4, "layers_disagree", "names 3 layers, num_hidden_layers=4"),
    ("llama", "rope_parameters", {"rope_theta": 1e4}, "rope_type", "rope_type=None"),
    ("llama", "rope_parameters", None, "rope_type", "rope_type=None"),
    ("llama", "rope_parameters", {"rope_type": "default"}, "rope_theta", "no rope_theta"),
    ("llama", "rope_parameters", {"full_attention": {"rope_type": "default"}}, "rope_layout", "by layer type"),
    ("gemma3", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "rope_layout", "not given by layer"),
    (
        "gemma3",
        "rope_parameters",
        {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_layout",
        "no entry for sliding_attention",
    ),
]


def require_refused(config: Any, name: str, text: str) -> None:
    found = {refusal.name: refusal for refusal in refusals(config)}
    assert name in found
    assert text in found[name].cause
    first = next(iter(found.values()))
    with pytest.raises(UnsupportedError) as error:
        family_of(config)
    assert error.value.reason is Reason.MODEL_UNSUPPORTED
    assert (error.value.cause, error.value.next_step) == (first.cause, first.next_step)
    assert first.next_step
    assert first.name == name


@pytest.mark.parametrize(("kind", "options", "name", "text"), FOREIGN)
def test_architectures(kind: str, options: dict[str, Any], name: str, text: str) -> None:
    require_refused(getattr(transformers, kind)(**options), name, text)


@pytest.mark.parametrize(("family", "options", "name", "text"), SETTINGS)
def test_settings(family: str, options: dict[str, Any], name: str, text: str) -> None:
    require_refused(tiny_config(family, **options), name, text)


@pytest.mark.parametrize(("family", "field", "value", "name", "text"), SET_LATER)
def test_values_that_transformers_lets_pass(family: str, field: str, value: Any, name: str, text: str) -> None:
    config = tiny_config(family)
    vars(config)[field] = value
    require_refused(config, name, text)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "proportional", "unheard-of"])
def test_rotary_rules(rope_type: str) -> None:
    config = tiny_config("llama")
    config.rope_parameters["rope_type"] = rope_type
    require_refused(config, "rope_type", f"rope_type={rope_type!r}")
    two_bases = tiny_config("gemma3")
    two_bases.rope_parameters["sliding_attention"]["rope_type"] = rope_type
    require_refused(two_bases, "rope_type", f"sliding_attention: rope_type={rope_type!r}")


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_served_configurations_have_no_refusals(name: str) -> None:
    config = tiny_config(name)
    assert list(refusals(config)) == []
    assert config.model_type in family_of(config).names


def test_all_reasons_are_told_not_only_the_first() -> None:
    names = [refusal.name for refusal in refusals(transformers.KimiLinearConfig())]
    assert names == ["latent_attention", "hybrid_layers", "unknown_family"]


def test_something_that_is_no_configuration() -> None:
    require_refused(object(), "unknown_family", "model_type=None")


@pytest.mark.slow
def test_every_causal_language_model_of_transformers() -> None:
    """Served are the families' own names and no other, whatever Transformers comes with."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    served, checked = set(), 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.CONFIG_MAPPING[kind]()
        except StrictDataclassError:  # a configuration without defaults
            continue
        checked += 1
        if not list(refusals(config)):
            served.add(config.model_type)
    assert checked > 150
    assert served == {name for family in FAMILIES for name in family.names}
