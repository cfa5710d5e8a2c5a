"""Every model family in every mode of generation: logits as good as the stock cache's, ids equal to its ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_matrix import MODES, Case
from tiny_models import FAMILY_NAMES

VARIANTS = ("mistral-full", "qwen2-sliding", "gpt_neox-serial")
"""Second settings of a family, which run by default in the modes below."""

TELLING = ("eviction", "save and restore", "padded batch")


def cells() -> list[Any]:
    return [
        pytest.param(name, mode, marks=[pytest.mark.slow] if name in VARIANTS and mode not in TELLING else [])
        for name in FAMILY_NAMES
        for mode in MODES
    ]


@pytest.mark.parametrize(("family", "mode"), cells())
def test_family_in_mode(tmp_path: Path, family: str, mode: str) -> None:
    MODES[mode].run(Case(family, tmp_path))
