"""Four ledgers, kept apart; not measured is not zero."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from kvstrata.contract.error_ledgers import (
    ErrorLedgers,
    PayloadError,
    ReductionError,
    RepresentationError,
    SupportLedger,
)
from kvstrata.errors import ConfigurationError

SUPPORT = SupportLedger(rows=256, visible=4096, omitted_mass=0.2, error=0.1, dense_norm=1.5, recall=0.7)


def test_what_was_not_measured_stays_none() -> None:
    ledgers = ErrorLedgers(support=SUPPORT)
    data = json.loads(json.dumps(ledgers.to_json()))
    assert list(data) == ["representation", "support", "payload", "reduction"]
    assert data["support"] == dataclasses.asdict(SUPPORT)
    assert data["representation"] is data["payload"] is data["reduction"] is None
    zero = ErrorLedgers(payload=PayloadError(256, 0.0, 0.0))
    assert zero != ErrorLedgers()
    assert zero.to_json()["payload"]["key_greatest"] == 0.0


def test_there_is_no_sum() -> None:
    names = {name for name in dir(ErrorLedgers) if not name.startswith("_")}
    assert names == {"payload", "reduction", "representation", "support", "to_json"}


def test_lossless_and_within() -> None:
    assert PayloadError(1, 0.0, 0.0).lossless
    assert not PayloadError(1, 0.0, 1e-9, "int8").lossless
    assert ReductionError(2, 1e-6, 1e-6).within
    assert not ReductionError(2, 2e-6, 1e-6).within


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (RepresentationError, {"units": -1, "mean_absolute": 0.0, "greatest": 0.0}, "units"),
        (RepresentationError, {"units": 1, "mean_absolute": math.nan, "greatest": 0.0}, "mean_absolute"),
        (RepresentationError, {"units": 1, "mean_absolute": 0.0, "greatest": 0.0, "violations": -1}, "violations"),
        (PayloadError, {"rows": 1, "key_greatest": math.inf, "value_greatest": 0.0}, "key_greatest"),
        (ReductionError, {"partials": 2, "greatest": -1.0, "tolerance": 0.0}, "greatest"),
    ],
)
def test_a_ledger_holds_amounts(kind: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{kind.__name__}.{field} must be finite and at least 0"):
        kind(**values)


@pytest.mark.parametrize("field", ["omitted_mass", "recall"])
def test_shares_are_at_most_one(field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SupportLedger.{field} must be at most 1, got 1.5"):
        dataclasses.replace(SUPPORT, **{field: 1.5})
