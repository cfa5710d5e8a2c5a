"""Any readable name is legal, and none is a path."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import Reason, SessionError
from kvstrata.sessions.names import check_name, folder_name

WEIRD = [
    "a",
    "x" * 255,
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "~",
    "C:\\con",
    "a b",
    " ",
    "имя",
    "名前",
    "e\u0301",
    "\u00e9",
    "👩‍👩‍👧",
    "\u202etxt",
    "[bold]x[/bold]",
    "--json",
    "%00",
    "*?",
    "a.json",
]


@pytest.mark.parametrize("name", WEIRD)
def test_readable_names_are_legal(name: str) -> None:
    assert check_name(name) == name


def test_weird_names_are_all_different_sessions() -> None:
    assert len({folder_name("default", name) for name in WEIRD}) == len(WEIRD)


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", "a\nb", "\t", "\x7f", "\x85", "\ud800", None, 7, b"bytes"])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(SessionError) as refusal:
        check_name(name)
    assert refusal.value.reason is Reason.SESSION_NAME_INVALID
    assert refusal.value.next_step
    refusal.value.cause.encode("ascii")


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=255))
def test_only_hexadecimal_digits_reach_the_file_system(name: str) -> None:
    assert re.fullmatch("[0-9a-f]{64}", folder_name("default", name))


@given(
    st.tuples(st.text(max_size=4), st.text("ab/", min_size=1)),
    st.tuples(st.text(max_size=4), st.text("ab/", min_size=1)),
)
def test_tenants_and_names_do_not_run_together(left: tuple[str, str], right: tuple[str, str]) -> None:
    assert (folder_name(*left) == folder_name(*right)) == (left == right)
