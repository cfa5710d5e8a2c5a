"""Every reason is documented, and every exception keeps its promise of being the nearest builtin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvstrata.errors
from kvstrata.cli.exits import ExitCode
from kvstrata.errors import DamagedError, KvstrataError, Reason, StoreError

PAGE = (Path(__file__).parent.parent / "docs" / "errors.md").read_text(encoding="utf-8")
ROWS = {match[1]: match[2].strip() for match in re.finditer(r"^\| `(\w+)` \|[^|]+\|([^|]+)\|$", PAGE, re.MULTILINE)}


def test_each_reason_has_a_line_that_says_what_to_do() -> None:
    assert set(ROWS) == {str(reason) for reason in Reason}
    assert all(ROWS.values())


def test_each_exit_code_is_documented() -> None:
    documented = {int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert documented == set(ExitCode)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigurationError", ValueError),
        ("UnsupportedError", NotImplementedError),
        ("StateError", RuntimeError),
        ("BudgetError", MemoryError),
        ("RetrievalError", RuntimeError),
        ("KernelUnavailable", RuntimeError),
        ("ModelLoadError", ValueError),
        ("StoreError", OSError),
        ("SessionError", LookupError),
    ],
)
def test_exceptions_are_the_nearest_builtin(name: str, builtin: type[Exception]) -> None:
    kind = getattr(kvstrata.errors, name)
    assert issubclass(kind, KvstrataError)
    assert issubclass(kind, builtin)
    error = kind(Reason.CLOSED, "the cause", "the step")
    assert (error.reason, error.cause, error.next_step) == (Reason.CLOSED, "the cause", "the step")
    assert str(error) == "the cause [closed]\n  next: the step"


def test_damage_is_a_store_error_that_names_its_chunk() -> None:
    assert issubclass(DamagedError, StoreError)
    assert DamagedError(Reason.CHUNK_DAMAGED, "cause", chunk="00").chunk == "00"
