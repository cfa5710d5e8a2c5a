"""What the tests of faults share: one saved conversation of SmolLM2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fault_runs import SavedModel


@pytest.fixture(scope="session")
def smol(smollm2: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Made once: the conversation is computed and saved, and every test works on a copy."""
    return SavedModel(smollm2("float32"), tmp_path_factory.mktemp("faults"))
