"""The view computes what the model computes: bit for bit the rows that the stock cache is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILY_NAMES, tiny_model
from transformers import DynamicCache

from kvstrata.engines.transformers.families import TransformersView
from kvstrata.errors import Reason, UnsupportedError
from kvstrata.ports import ModelView

ROWS = 70


def forward(model: Any, rows: int = ROWS) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Hidden states in front of every layer [rows, width], and the (keys, values) that the cache was given."""
    stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Recorder(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            stored.append((keys[0].clone(), values[0].clone()))
            return super().update(keys, values, *args, **kwargs)

    ids = torch.randint(3, 199, (1, rows), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids, past_key_values=Recorder(config=model.config), output_hidden_states=True)
    return [states[0] for states in output.hidden_states], stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_projected_and_rotated_rows_are_those_of_the_cache(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype=dtype)
    view: ModelView = TransformersView(model)
    hidden, stored = forward(model)
    positions = torch.arange(ROWS)
    assert len(stored) == view.layers
    for layer, (keys, values) in enumerate(stored):
        query, key, value = view.project(layer, view.input_norm(layer, hidden[layer]))
        assert query.shape == (view.query_heads, ROWS, view.head_dim)
        assert key.shape == value.shape == (view.kv_heads, ROWS, view.head_dim)
        assert torch.equal(view.rotate(layer, key, positions), keys)
        assert torch.equal(value, values)
        assert not torch.equal(key, keys)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_rotated_queries_are_those_of_the_attention_function(name: str) -> None:
    """Every layer's queries and scale, as the model hands them to its attention function."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = tiny_model(name)
    view = TransformersView(model)
    seen: dict[int, tuple[torch.Tensor, float]] = {}

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        seen[module.layer_idx] = (query[0].clone(), kwargs["scaling"])
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("test-recorder", attend)
    try:
        model.config._attn_implementation = "test-recorder"
        hidden, _ = forward(model)
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("test-recorder")
    for layer in range(view.layers):
        query, _, _ = view.project(layer, view.input_norm(layer, hidden[layer]))
        rotated, scale = seen[layer]
        assert torch.equal(view.rotate(layer, query, torch.arange(ROWS)), rotated)
        assert view.scale == scale


def test_rows_may_stand_at_any_positions() -> None:
    """Rotation is a matter of each row's own position: a row out of the middle comes out the same alone."""
    for name in ("llama", "gemma3", "phi3", "gpt_oss"):
        model = tiny_model(name)
        view = TransformersView(model)
        hidden, stored = forward(model)
        for layer in (0, 1):
            _, key, _ = view.project(layer, view.input_norm(layer, hidden[layer]))
            wanted = torch.tensor([41, 3])
            assert torch.equal(view.rotate(layer, key[:, wanted], wanted), stored[layer][0][:, wanted])


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_projection_weights_reproduce_the_projection(name: str) -> None:
    """Up to 1e-5 of sums in another order, and but for the norms that follow in some families."""
    model = tiny_model(name)
    view = TransformersView(model)
    normed = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    for layer, attention in enumerate(view.family.attention_modules(model)):
        weights = view.projection_weights(layer)
        query, key, value = view.project(layer, normed)
        sides = [(weights.value, weights.value_bias, value, None)]
        norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        sides.append((weights.query, weights.query_bias, query, norms[0]))
        sides.append((weights.key, weights.key_bias, key, norms[1]))
        for weight, bias, projected, norm in sides:
            assert weight.shape == (projected.shape[0], view.head_dim, model.config.hidden_size)
            product = torch.einsum("rd,hed->hre", normed, weight)
            if bias is not None:
                product = product + bias[:, None]
            if norm is not None and norm.weight.numel() != view.head_dim:
                product = norm(product.transpose(0, 1).flatten(1)).unflatten(1, (-1, view.head_dim)).transpose(0, 1)
            elif norm is not None:
                product = norm(product)
            torch.testing.assert_close(product, projected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_projection_weights_are_views(name: str) -> None:
    model = tiny_model(name)
    live = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    weights = TransformersView(model).projection_weights(1)
    for tensor in vars(weights).values():
        assert tensor is None or tensor.untyped_storage().data_ptr() in live
        assert tensor is None or not tensor.requires_grad
    biased = {"qwen2", "qwen2-sliding", "gpt_neox", "gpt_neox-serial", "gpt_oss"}
    assert (weights.key_bias is not None) == (name in biased)


def test_weights_that_are_no_plain_matrix() -> None:
    """A projection that adds something to its matrix, as adapters do, is served, but has no weights to hand out."""

    class Adapted(torch.nn.Linear):
        pass

    model = tiny_model("llama")
    width = model.config.hidden_size
    model.model.layers[1].self_attn.k_proj = Adapted(width, 32, bias=False)
    view = TransformersView(model)
    view.projection_weights(0)
    with pytest.raises(UnsupportedError) as refusal:
        view.projection_weights(1)
    assert refusal.value.reason is Reason.OPERATION_UNSUPPORTED
    assert "Adapted" in refusal.value.cause
