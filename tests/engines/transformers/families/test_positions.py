"""Whatever decides rows besides weights and tokens stands in the position rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILY_NAMES, tiny_config, tiny_model

from kvstrata.engines.transformers.families import family_of

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def gemma_rope(**full: Any) -> dict[str, Any]:
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": full.pop("local", 10000.0)},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0} | full,
    }


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LLAMA3 | {"factor": 8.0}}),
    ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 5.0}}),
    ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 256}}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": YARN | {"factor": 8.0}}),
    ("llama", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    ("llama", {"rope_parameters": YARN | {"beta_fast": 16.0}}),
    ("mistral", {"sliding_window": 49}),
    ("mistral", {"sliding_window": None}),
    ("qwen2-sliding", {"max_window_layers": 2}),
    ("qwen2-sliding", {"use_sliding_window": False}),
    ("gemma3", {"sliding_window": 49}),
    ("gemma3", {"query_pre_attn_scalar": 25}),
    ("gemma3", {"rope_parameters": gemma_rope(factor=4.0)}),
    ("gemma3", {"rope_parameters": gemma_rope(rope_theta=999_999.0)}),
    ("gemma3", {"rope_parameters": gemma_rope(local=10001.0)}),
    ("gemma3", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}},
    ),
    ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 4}),
]


def test_every_change_gives_another_rule() -> None:
    """No two of the configurations of one family may share rows, the unchanged one included."""
    by_family: dict[str, list[Any]] = {}
    for name, change in CHANGES:
        rules = by_family.setdefault(name, [family_of(tiny_config(name)).position_rule()])
        rules.append(family_of(tiny_config(name, **change)).position_rule())
    for name, rules in by_family.items():
        assert len(set(rules)) == len(rules), name


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_rule_is_the_same_for_the_same_configuration(name: str) -> None:
    """Reading or building the model may write defaults into the configuration; the rule does not notice."""
    rule = family_of(tiny_config(name)).position_rule()
    model = tiny_model(name)
    assert family_of(model).position_rule(model) == rule
    assert rule.parameters == tuple(sorted(rule.parameters))
    assert all(isinstance(text, str) for pair in rule.parameters for text in pair)


def test_a_longer_context_limit_alone_changes_nothing() -> None:
    for rope in (None, YARN):
        short, long = (
            family_of(tiny_config("llama", max_position_embeddings=limit, rope_parameters=rope and dict(rope)))
            for limit in (2048, 4096)
        )
        assert short.position_rule() == long.position_rule()


def test_a_plain_rule_has_no_parameters() -> None:
    rule = family_of(tiny_config("llama")).position_rule()
    assert (rule.rope_type, rule.theta, rule.parameters) == ("default", 10000.0, ())


def test_the_rule_of_two_bases() -> None:
    """The global layers' base is the rule's; the sliding layers' stands beside it."""
    rule = family_of(tiny_config("gemma3")).position_rule()
    assert (rule.rope_type, rule.theta) == ("linear", 1_000_000.0)
    assert dict(rule.parameters) == {
        "full_attention.factor": "8.0",
        "scale": repr(24**-0.5),
        "sliding_attention.rope_theta": "10000.0",
        "sliding_attention.rope_type": "'default'",
        "windows": "48,-,48,-",
    }


def test_rounded_frequencies_are_told_apart(tmp_path: Path) -> None:
    """A cast of the whole model rounds its rotary frequencies, loading in that dtype does not: the rows differ."""
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(torch.bfloat16)
    rules = [family_of(each).position_rule(each) for each in (loaded, cast)]
    assert rules[0] == family_of(model).position_rule()
    assert rules[1].parameters == (("frequency_dtype", "bfloat16"),)
    ids = torch.arange(3, 60)[None]
    rows = [each(ids, use_cache=True).past_key_values.layers[0].keys for each in (loaded, cast)]
    assert not torch.equal(*rows)
