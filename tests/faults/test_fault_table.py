"""`docs/faults.md` names every test of a fault, and every test it names is there."""

from __future__ import annotations

import re
from pathlib import Path

from kvstrata.errors import Reason
from kvstrata.store.transfer_records import TransferOutcome

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
SECTION = "## What is injected, and what must happen"
OTHERS = {"test_fault_table.py", "test_full_disk.py"}


def rows() -> list[tuple[str, str, str]]:
    text = PAGE.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]
    table = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    return [row for row in table if row[0] != "fault"]


def fault_tests() -> set[str]:
    found = set[str]()
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name not in OTHERS:
            found.update(re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    return found


def test_the_table_and_the_tests_agree() -> None:
    named = [row[2].strip("`") for row in rows() if row[2] != "later"]
    assert len(named) == len(set(named))
    assert set(named) == fault_tests()
    assert [row[0] for row in rows() if row[2] == "later"] == ["a selection is cut off at its cap in every layer"]


def test_outcomes_are_named_as_the_product_names_them() -> None:
    known = {str(reason) for reason in Reason} | {str(outcome) for outcome in TransferOutcome}
    named = {name for row in rows() for name in re.findall(r"`(\w+)`", row[1])}
    assert named
    assert named <= known
