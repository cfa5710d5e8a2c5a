"""A number that cannot be is refused with its field and its value."""

from __future__ import annotations

import math

import pytest

from kvstrata.cost.bounds import require_finite
from kvstrata.errors import ConfigurationError


@pytest.mark.parametrize(
    ("value", "least", "above", "sentence"),
    [
        (-0.5, 0.0, False, "size=-0.5 must be finite and at least 0"),
        (0.0, 0.0, True, "size=0.0 must be finite and above 0"),
        (1, 2, False, "size=1 must be finite and at least 2"),
        (math.nan, 0.0, False, "size=nan must be finite and at least 0"),
        (math.inf, 0.0, False, "size=inf must be finite and at least 0"),
    ],
)
def test_refused(value: float, least: float, above: bool, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        require_finite("size", value, least=least, above=above)
    assert refusal.value.cause == sentence


@pytest.mark.parametrize(("value", "least", "above"), [(0.0, 0.0, False), (0.1, 0.0, True), (-5, -math.inf, False)])
def test_accepted(value: float, least: float, above: bool) -> None:
    require_finite("size", value, least=least, above=above)
