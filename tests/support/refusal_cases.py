"""One example of everything that is refused: models by the names of their refusals, and calls of an attached model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from matrix_runs import generate, padded, tokens
from tiny_models import tiny_config, tiny_model
from transformers import DynamicCache, QuantizedCache, StaticCache

from kvstrata.errors import Reason

__all__ = ["REFUSED_CALLS", "REFUSED_MODELS", "RefusedCall"]

PROMPT = tokens(40)


def _later(family: str, **values: Any) -> Any:
    config = tiny_config(family)
    vars(config).update(values)
    return config


def _live(change: Callable[[Any], Any]) -> Any:
    model = tiny_model("llama")
    change(model)
    return model


def _replace_module(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.__class__ = type("PatchedAttention", (type(attention),), {})


REFUSED_MODELS: dict[str, Callable[[], Any]] = {
    "encoder_decoder": transformers.T5Config,
    "multimodal_wrapper": transformers.LlavaConfig,
    "latent_attention": transformers.DeepseekV3Config,
    "hybrid_layers": transformers.Qwen3NextConfig,
    "chunked_attention": transformers.Llama4TextConfig,
    "score_softcapping": transformers.Gemma2Config,
    "bidirectional_attention": lambda: tiny_config("gemma3", use_bidirectional_attention=True),
    "alibi_positions": transformers.BloomConfig,
    "absolute_positions": transformers.GPT2Config,
    "shared_layers": transformers.Gemma3nTextConfig,
    "layers_differ": lambda: _later("llama", num_key_value_heads=[2, 2, 1]),
    "unknown_family": transformers.MixtralConfig,
    "rope_type": lambda: _later("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "rope_theta": lambda: _later("llama", rope_parameters={"rope_type": "default"}),
    "rope_layout": lambda: _later("gemma3", rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "window_not_read": lambda: _later("llama", sliding_window=32),
    "window_missing": lambda: _later("qwen2-sliding", sliding_window=None),
    "window_invalid": lambda: _later("mistral", sliding_window=0),
    "layer_types_not_read": lambda: _later("mistral", layer_types=["full_attention"] * 3),
    "layers_disagree": lambda: _later("qwen2", num_hidden_layers=4),
    "heads_disagree": lambda: _later("llama", num_key_value_heads=3),
    "foreign_module": lambda: _live(_replace_module),
    "several_devices": lambda: _live(lambda model: setattr(model, "lm_head", model.lm_head.to("meta"))),
    "offloaded": lambda: _live(lambda model: setattr(model, "hf_device_map", {"": "disk"})),
    "quantised_activations": lambda: _live(
        lambda model: setattr(model.config, "quantization_config", {"quant_method": "fbgemm_fp8"})
    ),
    "training_mode": lambda: _live(lambda model: model.train()),
    "frequencies_disagree": lambda: _live(lambda model: model.config.rope_parameters.update(rope_theta=12345.0)),
}
"""A model or configuration for every name of a `Refusal`."""


@dataclass(frozen=True)
class RefusedCall:
    """call: made with the attached model and its memory. error: its class. reason: `None` where Transformers refuses.

    text: what its message says. next_step: what the page advises where the message does not.
    """

    call: Callable[[Any, Any], Any]
    error: type[Exception]
    reason: Reason | None
    text: str
    next_step: str = ""


def _quantised() -> Any:
    """A cache of that class without one of the packages that do the rounding."""
    return QuantizedCache.__new__(QuantizedCache)


def _ids() -> torch.Tensor:
    return torch.tensor([PROMPT])


def _generate(model: Any, memory: Any, **options: Any) -> Any:
    return generate(model, padded([PROMPT]), memory.generate_kwargs(), 6, **options)


def _unsupported(text: str, call: Callable[[Any, Any], Any]) -> RefusedCall:
    from kvstrata.errors import UnsupportedError

    return RefusedCall(call, UnsupportedError, Reason.OPERATION_UNSUPPORTED, text)


REFUSED_CALLS: dict[str, RefusedCall] = {
    "a call without this memory's cache": _unsupported(
        "brings a DynamicCache", lambda model, memory: model.generate(_ids(), max_new_tokens=3)
    ),
    "`past_key_values=DynamicCache(...)`": _unsupported(
        "brings a DynamicCache",
        lambda model, memory: model(_ids(), past_key_values=DynamicCache(config=model.config)),
    ),
    "`past_key_values=StaticCache(...)`": _unsupported(
        "brings a StaticCache",
        lambda model, memory: model(_ids(), past_key_values=StaticCache(config=model.config, max_cache_len=64)),
    ),
    "`past_key_values=QuantizedCache(...)`": _unsupported(
        "brings a QuantizedCache", lambda model, memory: model(_ids(), past_key_values=_quantised())
    ),
    '`cache_implementation="static"`': _unsupported(
        "brings a StaticCache",
        lambda model, memory: model.generate(_ids(), max_new_tokens=3, cache_implementation="static"),
    ),
    "`cache_implementation=...` beside this memory's cache": RefusedCall(
        lambda model, memory: _generate(model, memory, cache_implementation="dynamic"),
        ValueError,
        None,
        "Passing both `cache_implementation`",
        "leave `cache_implementation` out",
    ),
    "`output_attentions=True`": _unsupported(
        "output_attentions", lambda model, memory: _generate(model, memory, output_attentions=True)
    ),
    "`assistant_early_exit=...`": _unsupported(
        "assistant_early_exit", lambda model, memory: _generate(model, memory, assistant_early_exit=1)
    ),
    "`model.generate_batch(...)`": _unsupported(
        "a paged cache of its own", lambda model, memory: model.generate_batch([_ids()[0].tolist()])
    ),
    "`assistant_model=` the attached model itself": _unsupported(
        "brings a DynamicCache", lambda model, memory: _generate(model, memory, assistant_model=model)
    ),
    "`guidance_scale=...`": _unsupported(
        "brings a DynamicCache", lambda model, memory: _generate(model, memory, guidance_scale=1.5)
    ),
    "drafts for a batch": RefusedCall(
        lambda model, memory: generate(
            model, padded([PROMPT, PROMPT]), memory.generate_kwargs(), 6, prompt_lookup_num_tokens=3
        ),
        ValueError,
        None,
        "only supported for batch_size = 1",
        "draft for one sequence at a time",
    ),
}
"""Calls of an attached model, by what the caller passes."""
