"""Tiny models with random weights, one for every shape of attention that a family can have."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["FAMILY_NAMES", "WINDOW", "tiny_config", "tiny_model"]

WINDOW = 48
"""Sliding window in tokens, of every model that has one: shorter than a prompt of a test, and no power of two."""

_VOCABULARY = 199
_STD = 0.2
"""Weights far larger than an untrained model's: attention is not uniform, so that a wrong row shows."""

_HEAD_NORM = 1.7
"""Mean scale of the norms over queries and keys, for the same reason."""

_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": WINDOW}),
    "mistral-full": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2", {"hidden_size": 64}),
    "qwen2-sliding": (
        "Qwen2",
        {"hidden_size": 64, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "olmo2": ("Olmo2", {"hidden_size": 64}),
    "gpt_neox": (
        "GPTNeoX",
        {
            "hidden_size": 64,
            "use_parallel_residual": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_neox-serial": (
        "GPTNeoX",
        {
            "hidden_size": 64,
            "use_parallel_residual": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        },
    ),
}

FAMILY_NAMES = tuple(_FAMILIES)
"""Every name that `tiny_model` takes."""


def tiny_config(family: str, **overrides: Any) -> Any:
    """Configuration of the tiny model `family`; `overrides` are arguments of the configuration's class."""
    import transformers

    stem, own = _FAMILIES[family]
    values = copy.deepcopy(_COMMON | own | overrides)
    if stem == "GPTNeoX":
        del values["num_key_value_heads"]
    name = "Gemma3TextConfig" if stem == "Gemma3" else f"{stem}Config"
    return getattr(transformers, name)(**values)


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """A new causal language model in evaluation mode, with the same weights for the same arguments."""
    import transformers

    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{_FAMILIES[family][0]}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name and name.endswith("weight"):
                    mean = _HEAD_NORM if "q_norm" in name or "k_norm" in name else 1.0
                    # Gemma keeps scales as differences from one.
                    parameter.normal_(mean - 1.0 if _FAMILIES[family][0] == "Gemma3" else mean, 0.2)
                elif name.endswith("sinks"):
                    parameter.normal_(1.0, 1.0)
                else:
                    parameter.normal_(0.0, _STD)
    return model.to(dtype).eval()
