"""What a model's rows depend on is in their context; what would change rows behind its back is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILY_NAMES, tiny_model

from kvstrata.contract.identity import ChunkContext, ModelIdentity, Namespace, first_difference
from kvstrata.engines.transformers.context import chunk_context, segment_layout, weights_identity
from kvstrata.errors import ConfigurationError, Reason, UnsupportedError


def context(model: Any, adapters: Any = None, **options: Any) -> Any:
    return chunk_context(
        model, options.get("identity", ModelIdentity("id:m")), options.get("namespace", Namespace()), 64, adapters
    )


def test_the_geometry_of_a_model(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama("bfloat16", layers=3, query_heads=6, kv_heads=2, head_dim=16)
    found = context(model)
    assert (found.abi.layers, found.abi.query_heads, found.abi.kv_heads, found.abi.head_dim) == (3, 6, 2, 16)
    assert found.abi.dtype == "bfloat16"
    assert found.abi.representation == "keys-after-rotary"
    assert (found.position.rope_type, found.position.theta) == ("default", 10000.0)
    assert found.lineage == "exact"
    layout = segment_layout(model, 64)
    assert layout.segment_bytes == 2 * 2 * 64 * 16 * 2


def test_live_weights_are_told_apart(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    name = weights_identity(model)
    assert name == weights_identity(tiny_llama())
    assert name != weights_identity(tiny_llama(seed=1))
    assert name != weights_identity(tiny_llama("bfloat16"))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-6
    assert name != weights_identity(model)


def test_a_changed_configuration_is_another_model(tiny_llama: Callable[..., Any]) -> None:
    """The same weights under another norm epsilon give other rows."""
    model = tiny_llama()
    name = weights_identity(model)
    model.config.rms_norm_eps = 1e-4
    assert name != weights_identity(model)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_scaled_positions_are_part_of_the_context(rope: str) -> None:
    def scaled(factor: float) -> Any:
        settings = {"rope_type": rope, "rope_theta": 10000.0, "factor": factor}
        if rope != "linear":
            settings["original_max_position_embeddings"] = 512
        if rope == "llama3":
            settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return context(tiny_model("llama", rope_parameters=settings))

    difference = first_difference(context(tiny_model("llama")), scaled(4.0))
    assert difference is not None
    assert difference.field == "position.rope_type"
    difference = first_difference(scaled(4.0), scaled(8.0))
    assert difference is not None
    assert difference.field == "position.parameters"


def test_windows_are_part_of_the_context() -> None:
    """Rows of deeper layers depend on what the rows below them could see."""
    difference = first_difference(*(context(tiny_model("mistral", sliding_window=width)) for width in (48, 49)))
    assert difference is not None
    assert difference.field == "position.parameters"
    assert "48,48,48" in difference.stored


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_family_has_a_context_and_a_layout(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(name, dtype=dtype)
        found, layout = context(model), segment_layout(model, 64)
        assert found.abi.layers == model.config.num_hidden_layers
        assert found.abi.dtype == layout.dtype == str(dtype).removeprefix("torch.")
        assert (found.abi.query_heads, layout.query_heads) == (4, 4)
        assert found.abi.kv_heads == layout.kv_heads == (4 if name.startswith("gpt_neox") else 2)
        assert found.abi.head_dim == layout.head_dim == 16
        assert ChunkContext.from_json(found.to_json()).digest == found.digest


def test_families_do_not_share_rows() -> None:
    """Two families may have the same geometry and position rule; what tells them apart is the artefact."""
    digests = {context(tiny_model(name), identity=weights_identity(tiny_model(name))).digest for name in FAMILY_NAMES}
    assert len(digests) == len(FAMILY_NAMES)


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "unheard-of"])
def test_positions_that_change_stored_keys_are_refused(tiny_llama: Callable[..., Any], rope: str) -> None:
    model = tiny_llama()
    model.config.rope_parameters |= {"rope_type": rope, "factor": 4.0}
    with pytest.raises(UnsupportedError) as refusal:
        context(model)
    assert refusal.value.reason is Reason.MODEL_UNSUPPORTED
    assert rope in refusal.value.cause


def test_adapters_must_be_declared(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    model._hf_peft_config_loaded = True
    with pytest.raises(UnsupportedError) as refusal:
        context(model)
    assert refusal.value.reason is Reason.ADAPTERS_UNDECLARED
    first, second = context(model, ("a@1", "b@1")), context(model, ("b@1", "a@1"))
    assert first.model.adapters == ("a@1", "b@1")
    assert first.digest != second.digest


def test_dtypes_and_geometries_that_are_not_served(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama().double()
    with pytest.raises(UnsupportedError) as refusal:
        segment_layout(model, 64)
    assert refusal.value.reason is Reason.MODEL_UNSUPPORTED
    assert "float64" in refusal.value.cause
    with pytest.raises(ConfigurationError) as odd:
        segment_layout(tiny_llama(head_dim=12), 64)
    assert odd.value.reason is Reason.INVALID_ARGUMENT


def test_a_model_on_two_devices(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    model.lm_head = model.lm_head.to("meta")
    with pytest.raises(UnsupportedError) as refusal:
        context(model)
    assert refusal.value.reason is Reason.MODEL_UNSUPPORTED
    assert "2 devices" in refusal.value.cause
