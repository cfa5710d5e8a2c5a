"""The example on the gate's page runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstrata.cost.prepublication import Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "methods" / "gate.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "gate.md", "exec"), {})
    promised = re.findall(r"^    (.*)$", PAGE.split("It prints\n")[1].split("\n## ")[0], re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised
    assert len(promised) == 3


def test_the_page_lists_every_outcome_in_order() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [str(outcome) for outcome in Outcome]
