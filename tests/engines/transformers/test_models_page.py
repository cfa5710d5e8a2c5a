"""The page of models names every family, mode and refusal that there is, and every example on it is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from model_matrix import MODES
from models_page import BEGIN, END, generated_part, render, rewrite
from refusal_cases import REFUSED_CALLS, REFUSED_MODELS
from tiny_models import FAMILY_NAMES

import kvstrata.engines.transformers.families as families
from kvstrata.engines.transformers.families import FAMILIES, refusals

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
PASSED = {(family, mode): "passed" for family in FAMILY_NAMES for mode in MODES}


def refusal_names() -> set[str]:
    """Every name that the source gives to a refusal."""
    folder = Path(families.__file__).parent
    found = [re.findall(r'\bRefusal\(\s*"(\w+)"', path.read_text()) for path in folder.glob("*.py")]
    return {name for names in found for name in names}


def test_every_family_and_mode_is_on_the_page() -> None:
    part = generated_part(PAGE)
    for name in (*FAMILY_NAMES, *(kind for family in FAMILIES for kind in family.names)):
        assert f"`{name}`" in part
    for mode in MODES:
        (row,) = re.findall(rf"^\| {re.escape(mode)} \|(.*)\|$", part, flags=re.MULTILINE)
        assert [cell.strip() for cell in row.split("|")] == ["passed"] * len(FAMILY_NAMES)


def test_every_refusal_is_on_the_page() -> None:
    part = generated_part(PAGE)
    assert set(REFUSED_MODELS) == refusal_names()
    for name in REFUSED_MODELS:
        assert part.count(f"| `{name}` |") == 1
    for name in REFUSED_CALLS:
        assert part.count(f"| {name} |") == 1


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_every_example_is_refused_by_its_name(name: str) -> None:
    (refusal,) = [found for found in refusals(REFUSED_MODELS[name]()) if found.name == name]
    row = f"| `{name}` | {refusal.cause} | {refusal.next_step} |"
    assert row in generated_part(PAGE)


def test_a_page_is_rewritten_between_its_marks() -> None:
    assert rewrite(f"before\n{BEGIN}\nold\n{END}\nafter\n", f"{BEGIN}\nnew\n{END}") == (
        f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    )
    for page in ("", BEGIN, END):
        with pytest.raises(ValueError, match="no lines"):
            rewrite(page, "new")


def test_outcomes_are_shown_and_none_may_be_missing() -> None:
    failed = PASSED | {("gemma3", "beams"): "failed"}
    (row,) = re.findall(r"^\| beams \|.*$", render(failed), flags=re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")[1:]]
    assert cells == ["failed" if name == "gemma3" else "passed" for name in FAMILY_NAMES]
    del failed["llama", "decode"]
    with pytest.raises(ValueError, match="1 cells have not run"):
        render(failed)
