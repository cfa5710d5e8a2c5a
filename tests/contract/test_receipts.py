"""Receipts are records: frozen, plain in JSON, and a miss is no hit."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvstrata.contract.identity import FieldDifference
from kvstrata.contract.receipts import Ledger, Recompute, RestoreReceipt, StepReceipt, TierTraffic
from kvstrata.errors import Reason


def make_ledger() -> Ledger:
    numbers = {item.name: 1 for item in dataclasses.fields(Ledger)}
    recompute = Recompute(64, 10, Reason.CHUNK_DAMAGED, "chunk 12 is damaged")
    return Ledger(**(numbers | {"traffic": {"file": TierTraffic(3, 2, 1)}, "recomputes": (recompute,)}))


def test_a_ledger_in_json() -> None:
    plain = json.loads(json.dumps(make_ledger().to_json()))
    assert plain["traffic"] == {"file": {"requested_bytes": 3, "moved_bytes": 2, "resident_hit_bytes": 1}}
    assert plain["recomputes"] == [
        {"start": 64, "tokens": 10, "reason": "chunk_damaged", "detail": "chunk 12 is damaged"}
    ]
    assert set(plain) == {item.name for item in dataclasses.fields(Ledger)}


def test_a_hit_has_no_reason() -> None:
    hit = RestoreReceipt("talk", 1, 10, 9, 9, 0, 0, 0.0)
    assert hit.hit
    difference = FieldDifference("position.theta", "1.0", "2.0")
    miss = dataclasses.replace(hit, restored_tokens=0, reason=Reason.CONTEXT_DIFFERS, difference=difference)
    assert not miss.hit
    assert str(miss.difference) == "position.theta: stored 1.0, wanted 2.0"


@pytest.mark.parametrize(
    "receipt",
    [make_ledger(), RestoreReceipt("talk", 1, 10, 9, 9, 0, 0, 0.0), StepReceipt(0, 1, 1, 0, 0, 0, 0.0, 0.0, 0)],
)
def test_receipts_cannot_be_changed(receipt: object) -> None:
    name = dataclasses.fields(receipt)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(receipt, name, 0)


def test_a_step_says_that_it_is_exact() -> None:
    assert StepReceipt(0, 1, 1, 0, 0, 0, 0.0, 0.0, 0).contract == "exact"
