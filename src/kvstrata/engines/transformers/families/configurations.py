"""What no family can serve, told from a configuration alone. What is not understood is refused, never guessed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstrata.engines.transformers.families.base import Family
from kvstrata.engines.transformers.families.positions import SERVED_ROPE_TYPES, rope_settings
from kvstrata.engines.transformers.families.refusal import Refusal

__all__ = ["architecture_refusals", "setting_refusals"]

_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})
_STATE_SPACE = (
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm"),
    *("zamba", "zamba2", "zaya1"),
)
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "longcat_flash", "minicpm3", "mistral4")
_ABSOLUTE = ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "imagegpt", "openai-gpt", "opt", "xglm")
_ALIBI = ("bloom", "mpt")
_SUB_CONFIGURATIONS = ("text_config", "vision_config", "audio_config", "thinker_config")
_GEOMETRY = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
_GEOMETRY_BY_LAYER = ("block_configs", "num_key_value_heads_per_layer", "global_head_dim", "num_query_heads")
"""Settings by which published architectures (DeciLM, OpenELM, Gemma 4) give layers heads of their own."""


def architecture_refusals(config: Any) -> Iterator[Refusal]:
    """Reasons that hold whatever the family is, the most telling first."""
    kind = getattr(config, "model_type", None)
    if getattr(config, "is_heterogeneous", False):
        names = ", ".join(sorted(getattr(config, "per_layer_attributes", None) or ()))
        yield Refusal("layers_differ", f"per_layer_config is set: layers differ in {names}")
        return  # Such a configuration does not let its attributes be read.
    if getattr(config, "is_encoder_decoder", False):
        yield Refusal("encoder_decoder", "is_encoder_decoder=True: decoder rows depend on an encoder's input")
    parts = [name for name in _SUB_CONFIGURATIONS if getattr(config, name, None) is not None]
    if parts:
        yield Refusal(
            "multimodal_wrapper",
            f"model_type={kind!r} wraps {', '.join(parts)}: rows may come from images or sound, which token ids do not "
            "name",
            "load the text model by itself, or use the stock cache",
        )
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None or kind in _LATENT:
        field = f"kv_lora_rank={rank}" if rank is not None else f"model_type={kind!r}"
        yield Refusal("latent_attention", f"{field}: keys and values are kept as one latent row for all heads")
    yield from _layer_types(config, kind)
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        yield Refusal("score_softcapping", f"attn_logit_softcapping={cap}: scores are capped before the softmax")
    for field, harmful in (("use_bidirectional_attention", True), ("is_causal", False)):
        value = getattr(config, field, None)
        if value is not None and bool(value) is harmful:
            yield Refusal("bidirectional_attention", f"{field}={value}: rows change when later tokens come")
    if kind in _ALIBI or getattr(config, "alibi", False):
        yield Refusal("alibi_positions", f"model_type={kind!r}: positions are biases on the scores (ALiBi)")
    if kind in _ABSOLUTE:
        yield Refusal("absolute_positions", f"model_type={kind!r}: positions are absolute embeddings, not rotary")
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:
        yield Refusal("shared_layers", f"num_kv_shared_layers={shared}: layers read each other's keys and values")
    by_layer = [name for name in _GEOMETRY if isinstance(getattr(config, name, None), list | tuple | dict)]
    by_layer += [name for name in _GEOMETRY_BY_LAYER if getattr(config, name, None) is not None]
    if by_layer:
        yield Refusal("layers_differ", f"{by_layer[0]} is set: layers differ in heads or head_dim")


def setting_refusals(family: Family) -> Iterator[Refusal]:
    """Settings of a known family that are not served: rotary rules, windows, odd geometry."""
    config = family.config
    yield from _rope(family)
    yield from family.refusals()
    types = getattr(config, "layer_types", None)
    if types is not None and len(types) != family.layers:
        yield Refusal("layers_disagree", f"layer_types names {len(types)} layers, num_hidden_layers={family.layers}")
    window = getattr(config, "sliding_window", None)
    if window is None and types is not None and "sliding_attention" in types:
        yield Refusal("window_missing", "layer_types has sliding_attention, but sliding_window is not set")
    if window is not None and window < 1:
        yield Refusal("window_invalid", f"sliding_window={window} is not a positive number of tokens")
    if family.query_heads % family.kv_heads:
        yield Refusal(
            "heads_disagree", f"{family.query_heads} query heads cannot share {family.kv_heads} key heads evenly"
        )


def _layer_types(config: Any, kind: str | None) -> Iterator[Refusal]:
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    chunk = getattr(config, "attention_chunk_size", None)
    if "chunked_attention" in types or chunk is not None:
        yield Refusal("chunked_attention", f"attention_chunk_size={chunk}: layers see only their own chunk of tokens")
    strange = sorted({str(name) for name in types} - _ATTENTION_TYPES - {"chunked_attention"})
    if strange:
        yield Refusal(
            "hybrid_layers", f"layer_types has {', '.join(strange)}: they do not keep and read a row of each token"
        )
    elif kind in _STATE_SPACE:
        yield Refusal(
            "hybrid_layers", f"model_type={kind!r}: recurrent or linear-attention layers keep no row for each token"
        )


def _rope(family: Family) -> Iterator[Refusal]:
    by_type = rope_settings(family.config)
    nested = "" not in by_type
    if nested is not family.rope_per_layer_type:
        yield Refusal(
            "rope_layout",
            f"rope_parameters is {'' if nested else 'not '}given by layer type, which {family.names[0]} does not read",
        )
        return
    for kind, settings in by_type.items():
        prefix = f"{kind}: " if kind else ""
        rope_type = settings.get("rope_type")
        if rope_type not in SERVED_ROPE_TYPES:
            yield Refusal(
                "rope_type",
                f"{prefix}rope_type={rope_type!r} is not served; types served: {', '.join(sorted(SERVED_ROPE_TYPES))}",
                "use the stock cache: under this rule stored keys may change with the length of the history",
            )
        if settings.get("rope_theta") is None:
            yield Refusal("rope_theta", f"{prefix}rope_parameters has no rope_theta")
    missing = sorted(set(getattr(family.config, "layer_types", None) or ()) - set(by_type)) if nested else []
    if missing:
        yield Refusal("rope_layout", f"rope_parameters has no entry for {', '.join(missing)}")
