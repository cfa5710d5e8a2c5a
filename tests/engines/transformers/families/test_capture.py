"""Keys before their rotary position: what the hooks see, turned, is what the cache stores; and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILY_NAMES, tiny_model
from transformers import DynamicCache

from kvstrata.engines.transformers.families import TransformersView, capture_keys, family_of


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_captured_keys_turned_are_the_stored_ones(name: str, dtype: torch.dtype) -> None:
    """A prompt in two steps and batches of two, so that neither positions nor sequences can be mixed up."""
    model = tiny_model(name, dtype=dtype)
    family, view = family_of(model), TransformersView(model)
    ids = torch.randint(3, 199, (2, 40), generator=torch.Generator().manual_seed(1))
    captured: list[tuple[int, torch.Tensor]] = []
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), capture_keys(model, family, lambda layer, keys: captured.append((layer, keys.clone()))):
        model(ids[:, :33], past_key_values=cache)
        model(ids[:, 33:], past_key_values=cache)
    assert [layer for layer, _ in captured] == [*range(family.layers)] * 2
    for layer in range(family.layers):
        keys = torch.cat([keys for index, keys in captured if index == layer], dim=2)
        assert keys.shape == (2, family.kv_heads, 40, family.head_dim)
        assert not keys.requires_grad
        for sequence in (0, 1):
            turned = view.rotate(layer, keys[sequence], torch.arange(40))
            assert torch.equal(turned, cache.layers[layer].keys[sequence])


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_nothing_is_left_on_the_model(name: str) -> None:
    model = tiny_model(name)
    ids = torch.arange(3, 12)[None]
    before = model(ids).logits
    count = hooks(model)
    seen: list[int] = []

    def fail(layer: int, keys: torch.Tensor) -> None:
        seen.append(layer)
        if layer == 1:
            raise RuntimeError("sink")

    with pytest.raises(RuntimeError, match="sink"), capture_keys(model, family_of(model), fail):
        model(ids)
    assert seen == [0, 1]
    assert hooks(model) == count
    assert torch.equal(model(ids).logits, before)
    assert seen == [0, 1]


def test_capturing_changes_no_logits() -> None:
    model = tiny_model("gemma3")
    ids = torch.arange(3, 90)[None]
    with torch.no_grad():
        plain = model(ids).logits
        with capture_keys(model, family_of(model), lambda layer, keys: None):
            assert torch.equal(model(ids).logits, plain)
