"""Every byte on one line, in the unit of that line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from kvstrata.contract.method import Unit
from kvstrata.contract.unit_expansion import UnitExpansion
from kvstrata.cost.unit_ledger import BYTE_LEDGER, ByteLedger, ChargedPer, UnitCosts
from kvstrata.errors import ConfigurationError, Reason, RetrievalError

module: Any = import_module("kvstrata.cost.unit_ledger")
PAGES = UnitExpansion(Unit.PAGE, 4, 8, (3, 1, 0), (3, 1), (6, 7, 2, 3), (0,), (0, 2, 3, 6, 7), (0, 2))
COSTS = UnitCosts.of(2, 2, candidate_bytes=4, descriptor_bytes=8, setup_bytes=16)
LEDGER = ByteLedger.of(PAGES, COSTS, probe_bytes=32)


def test_worked_ledger() -> None:
    assert ByteLedger(32, 12, 16, 40, 24, 16) == LEDGER
    assert LEDGER.read_amplification == (32 + 12 + 16 + 24 + 16) / 40
    assert LEDGER.require(PAGES, COSTS, 32) is LEDGER


def test_a_selection_that_is_resident_moves_nothing() -> None:
    ledger = ByteLedger.of(replace(PAGES, resident=PAGES.support), COSTS)
    assert (ledger.transfer_bytes, ledger.setup_bytes, ledger.support_bytes) == (0, 0, 40)


def test_no_rows_have_no_amplification() -> None:
    empty = UnitExpansion(Unit.ROW, 8, 8, (1,), (), (), (), ())
    assert ByteLedger.of(empty, COSTS, 10).read_amplification == 0.0


WRONG: dict[str, tuple[dict[str, Any], Reason]] = {
    "lines_present": ({"setup_bytes": None}, Reason.LEDGER_LINE_MISSING),
    "lines_apart": ({"probe_bytes": 0, "support_bytes": 72}, Reason.LEDGER_COLLAPSED),
    "descriptor_unit": ({"descriptor_bytes": 40, "descriptor_per": ChargedPer.ROW}, Reason.LEDGER_UNIT_MISMATCH),
    "candidate_lines": ({"candidate_bytes": 8}, Reason.LEDGER_UNIT_MISMATCH),
    "support_lines": ({"support_bytes": 20}, Reason.PAYLOAD_BYTES_MISMATCH),
    "transfer_lines": ({"transfer_bytes": 40}, Reason.TRANSFER_BYTES_MISMATCH),
    "setup_lines": ({"setup_bytes": 32}, Reason.TRANSFER_BYTES_MISMATCH),
}


def _refusal(call: Callable[[], object]) -> Reason | None:
    try:
        call()
    except RetrievalError as error:
        return error.reason
    return None


@pytest.mark.parametrize("check", WRONG)
def test_each_check_refuses_and_is_needed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reason = WRONG[check]
    wrong = replace(LEDGER, **changes)
    with pytest.raises(RetrievalError) as caught:
        wrong.require(PAGES, COSTS, 32)
    assert caught.value.reason is reason
    monkeypatch.setattr(module, "BYTE_LEDGER", tuple(one for one in BYTE_LEDGER if one.__name__ != check))
    assert _refusal(lambda: wrong.require(PAGES, COSTS, 32)) is not reason


def test_the_table_has_every_check() -> None:
    assert list(WRONG) == [check.__name__ for check in BYTE_LEDGER]


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_dim", 0), ("itemsize", 0), ("candidate_bytes", -4), ("descriptor_bytes", 1.5), ("setup_bytes", True)],
)
def test_costs_that_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"UnitCosts.{field} must be a whole number"):
        replace(COSTS, **{field: value})


def test_a_row_is_k_and_v() -> None:
    with pytest.raises(RetrievalError) as caught:
        replace(COSTS, row_bytes=4)
    assert caught.value.reason is Reason.PAYLOAD_BYTES_MISMATCH


def test_lines_are_not_negative() -> None:
    with pytest.raises(ConfigurationError, match=r"ByteLedger\.transfer_bytes"):
        replace(LEDGER, transfer_bytes=-1)
