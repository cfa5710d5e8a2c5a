"""From a live Transformers model to the context its K/V rows belong to, or a refusal that names what is not served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from blake3 import blake3

from kvstrata.contract.identity import CacheAbi, ChunkContext, ModelIdentity, Namespace, PositionRule
from kvstrata.contract.layout import ITEM_SIZES, SegmentLayout
from kvstrata.errors import Reason, UnsupportedError

__all__ = ["chunk_context", "segment_layout", "weights_identity"]

_FAMILIES = frozenset({"llama"})
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rules under which a row depends on its own position alone, and never on how long the history has become."""


def chunk_context(
    model: Any, identity: ModelIdentity, namespace: Namespace, chunk_tokens: int, adapters: Sequence[str] | None
) -> ChunkContext:
    """The context of all rows that `model` computes as it is configured now.

    adapters: names of the adapters in force, in order; `None` if there are none. Errors: `UnsupportedError` for a
    family that is not served, a device map over several devices, or adapters that are loaded and not named.
    """
    config = model.config
    _require_family(config)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedError(
            Reason.MODEL_UNSUPPORTED, f"the model is spread over {len(devices)} devices", "load it on one device"
        )
    if adapters is None:
        if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
            raise UnsupportedError(
                Reason.ADAPTERS_UNDECLARED,
                "the model carries adapters, and rows computed under them must say so",
                'pass adapters=("name@revision", ...) to attach',
            )
        adapters = ()
    layout = segment_layout(model, chunk_tokens)
    rope = dict(config.rope_parameters or {})
    rope_type, theta = str(rope.pop("rope_type", "default")), float(rope.pop("rope_theta", 10000.0))
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedError(
            Reason.MODEL_UNSUPPORTED,
            f"rope_type={rope_type!r} is not served; types served: {', '.join(sorted(_ROPE_TYPES))}",
            "use the stock cache: under this rule stored keys change with the length of the history",
        )
    return ChunkContext(
        model=ModelIdentity(identity.artefact, (*identity.adapters, *adapters), identity.weights_generation),
        abi=CacheAbi(config.num_hidden_layers, layout.query_heads, layout.kv_heads, layout.head_dim, layout.dtype),
        position=PositionRule(rope_type, theta, tuple(sorted((name, repr(value)) for name, value in rope.items()))),
        namespace=namespace,
        chunk_tokens=chunk_tokens,
    )


def segment_layout(model: Any, chunk_tokens: int) -> SegmentLayout:
    """Layout of one layer's segment. Errors: `UnsupportedError` for a dtype or geometry that cannot be stored."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    _require_family(config)
    if dtype not in ITEM_SIZES:
        raise UnsupportedError(
            Reason.MODEL_UNSUPPORTED, f"dtype={dtype} is not served", "load the model in float32 or bfloat16"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return SegmentLayout(config.num_key_value_heads, heads, head_dim, dtype, chunk_tokens)


def weights_identity(model: Any) -> ModelIdentity:
    """Identity of a model whose artefact is not known: a digest over its live weights and configuration.

    Reads every parameter once (about 0.3 s a GB). Blocks.
    """
    hasher = blake3(derive_key_context="kvstrata live weights/1", max_threads=blake3.AUTO)
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    hasher.update(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        hasher.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        hasher.update(memoryview(flat.numpy()))
    return ModelIdentity(f"weights:blake3:{hasher.hexdigest()}")


def _require_family(config: Any) -> None:
    if config.model_type not in _FAMILIES:
        raise UnsupportedError(
            Reason.MODEL_UNSUPPORTED,
            f"model_type={config.model_type!r} is not served; families served: {', '.join(sorted(_FAMILIES))}",
            "use a model of a served family, or the stock cache",
        )
