"""Every model family in every mode of generation: logits as good as the stock cache's, ids equal to its ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_matrix import MODES, Case
from tiny_models import FAMILY_NAMES


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_family_in_mode(tmp_path: Path, family: str, mode: str) -> None:
    MODES[mode].run(Case(family, tmp_path))
