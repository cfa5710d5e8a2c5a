"""Families are classes in one tuple, found by name, also under a wrapper of adapters; the page shows a real one."""

from __future__ import annotations

import dataclasses
import inspect
import types
from pathlib import Path

import pytest
from tiny_models import FAMILY_NAMES, tiny_config, tiny_model

from kvstrata.engines.transformers.families import FAMILIES, Family, family_of
from kvstrata.engines.transformers.families.qwen3 import Qwen3

PAGE = Path(__file__).parents[4] / "docs" / "families.md"


def test_every_family_has_a_tiny_model_and_names_of_its_own() -> None:
    served = [name for family in FAMILIES for name in family.names]
    assert len(set(served)) == len(served)
    assert {type(family_of(tiny_config(name))) for name in FAMILY_NAMES} == set(FAMILIES)


def test_a_bound_family_is_frozen() -> None:
    family = family_of(tiny_config("llama"))
    assert isinstance(family, Family)
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.config = None  # type: ignore[misc]


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_modules_under_a_wrapper_of_adapters(name: str) -> None:
    """PEFT's model holds the real one behind `get_base_model`, and has a `base_model` that is something else."""
    model = tiny_model(name)
    wrapper = types.SimpleNamespace(peft_config={}, get_base_model=lambda: model, base_model=None)
    family = family_of(model)
    assert family.attention_modules(wrapper) == family.attention_modules(model)
    assert family.rotary(wrapper) is family.rotary(model)


def test_the_page_shows_the_file_as_it_is() -> None:
    shown = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert shown == inspect.getsource(Qwen3)
