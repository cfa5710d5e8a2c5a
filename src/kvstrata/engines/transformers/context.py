"""From a live Transformers model to the context its K/V rows belong to, or a refusal that names what is not served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from blake3 import blake3

from kvstrata.contract.identity import CacheAbi, ChunkContext, ModelIdentity, Namespace
from kvstrata.contract.layout import ITEM_SIZES, SegmentLayout
from kvstrata.engines.transformers.families import family_of
from kvstrata.errors import Reason, UnsupportedError
from kvstrata.kernels.block_table import require_kernel_geometry

__all__ = ["chunk_context", "segment_layout", "weights_identity"]


def chunk_context(
    model: Any, identity: ModelIdentity, namespace: Namespace, chunk_tokens: int, adapters: Sequence[str] | None
) -> ChunkContext:
    """The context of all rows that `model` computes as it is configured now.

    adapters: names of the adapters in force, in order; `None` if there are none. Errors: `UnsupportedError` for a
    model that `family_of` refuses, or adapters that are loaded and not named.
    """
    family = family_of(model)
    if adapters is None:
        if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
            raise UnsupportedError(
                Reason.ADAPTERS_UNDECLARED,
                "the model carries adapters, and rows computed under them must say so",
                'pass adapters=("name@revision", ...) to attach',
            )
        adapters = ()
    layout = segment_layout(model, chunk_tokens)
    return ChunkContext(
        model=ModelIdentity(identity.artefact, (*identity.adapters, *adapters), identity.weights_generation),
        abi=CacheAbi(family.layers, layout.query_heads, layout.kv_heads, layout.head_dim, layout.dtype),
        position=family.position_rule(model),
        namespace=namespace,
        chunk_tokens=chunk_tokens,
    )


def segment_layout(model: Any, chunk_tokens: int) -> SegmentLayout:
    """Layout of one layer's segment. Errors: `UnsupportedError` for a dtype or geometry that cannot be stored."""
    family, dtype = family_of(model), str(model.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise UnsupportedError(
            Reason.MODEL_UNSUPPORTED, f"dtype={dtype} is not served", "load the model in float32 or bfloat16"
        )
    layout = SegmentLayout(family.kv_heads, family.query_heads, family.head_dim, dtype, chunk_tokens)
    require_kernel_geometry(layout)
    return layout


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
