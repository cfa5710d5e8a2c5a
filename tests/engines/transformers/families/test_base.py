"""The facts a family tells about a configuration, against the masks, softmaxes and modules of the model itself."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILY_NAMES, WINDOW, tiny_config, tiny_model

from kvstrata.engines.transformers.families import LayerRule, TransformersView, family_of

ROWS = WINDOW * 2 + 7

WINDOWS = {
    "mistral": (WINDOW, WINDOW, WINDOW),
    "qwen2-sliding": (None, WINDOW, WINDOW),
    "gemma3": (WINDOW, None, WINDOW, None),
    "gpt_oss": (WINDOW, None, WINDOW, None),
}


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_layer_rules_are_the_masks_that_the_model_builds(name: str) -> None:
    """Probabilities of eager attention are positive exactly where the rule lets a row see a key."""
    model = tiny_model(name)
    rules = family_of(model).layer_rules
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 199, (1, ROWS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert tuple(rule.window for rule in rules) == WINDOWS.get(name, (None,) * len(attentions))
    columns = torch.arange(ROWS)
    for rule, probabilities in zip(rules, attentions, strict=True):
        first = torch.tensor([rule.first_visible(row) for row in range(ROWS)])
        visible = (columns <= columns[:, None]) & (columns >= first[:, None])
        assert torch.equal(probabilities[0] > 0, visible.expand_as(probabilities[0]))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_attention_follows_from_the_facts(name: str) -> None:
    """Queries, keys, scale, rules and sinks give the model's own probabilities, to 1e-5 of sums in another order."""
    model = tiny_model(name)
    view = TransformersView(model)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 199, (1, ROWS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids, output_attentions=True, output_hidden_states=True)
    positions = torch.arange(ROWS)
    family = view.family
    modules = zip(family.layer_rules, family.attention_modules(model), strict=True)
    for layer, (rule, attention) in enumerate(modules):
        query, key, _ = view.project(layer, view.input_norm(layer, output.hidden_states[layer][0]))
        query, key = view.rotate(layer, query, positions), view.rotate(layer, key, positions)
        scores = query @ key.repeat_interleave(view.query_heads // view.kv_heads, 0).mT * view.scale
        first = torch.tensor([rule.first_visible(row) for row in range(ROWS)])[:, None]
        scores = scores.masked_fill((positions > positions[:, None]) | (positions < first), -torch.inf)
        sinks = family.sinks(attention)
        assert (sinks is not None) == rule.sinks == (name == "gpt_oss")
        if sinks is not None:
            assert not sinks.requires_grad
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, ROWS, 1)], dim=-1)
        expected = torch.softmax(scores, dim=-1)[..., :ROWS]
        torch.testing.assert_close(output.attentions[layer][0], expected, rtol=1e-4, atol=1e-5)


def test_the_edge_of_a_window() -> None:
    """A window of W tokens counts the row itself."""
    assert [LayerRule(window=3).first_visible(row) for row in range(6)] == [0, 0, 0, 1, 2, 3]
    assert LayerRule(window=1).first_visible(9) == 9
    assert LayerRule().first_visible(9) == 0


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_geometry_is_that_of_the_modules(name: str) -> None:
    model = tiny_model(name)
    family = family_of(model.config)
    modules = family.attention_modules(model)
    assert [module.layer_idx for module in modules] == list(range(family.layers))
    for module in modules:
        assert family.head_dim == getattr(module, "head_dim", None) or module.head_size
        assert family.query_heads // family.kv_heads == getattr(module, "num_key_value_groups", 1)
        assert family.scale == module.scaling
    assert family.layer_modules(model)[1] is model.base_model.layers[1]


def test_a_family_is_bound_to_its_configuration() -> None:
    config = tiny_config("mistral")
    assert family_of(config) == family_of(config)
    assert family_of(config).layer_rules != family_of(tiny_config("mistral", sliding_window=None)).layer_rules
