from __future__ import annotations

from typing import Any

import pytest

from kvstrata.lab.conform.result import ConformReport, Figure, Refusals, TopicReport, agrees, compare


@pytest.mark.parametrize(
    ("published", "computed", "same"),
    [
        (512, 512, True),
        (512, 512.0, True),
        (512, 512.4, False),
        (3.47, 3.4689, True),
        (3.47, 3.4649, False),
        (0.5, 0.54, True),
        ([1, 2.5], (1, 2.51), True),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("x", "x", True),
        (1, True, False),
        (True, 1, True),
        (1, None, False),
        ([1], 1, False),
    ],
)
def test_values_are_compared_at_the_published_digits(published: Any, computed: Any, same: bool) -> None:
    assert agrees(published, computed) is same


def test_an_open_figure_is_listed_and_a_missing_one_differs() -> None:
    published = [
        {"key": "lost", "published": None, "status": "open"},
        {"key": "known", "published": 3, "status": "compared"},
        {"key": "forgotten", "published": 4, "status": "compared"},
    ]
    figures = compare(published, {"known": 3})
    assert figures == (
        Figure("lost", None, None, None),
        Figure("known", 3, 3, True),
        Figure("forgotten", 4, None, False),
    )
    assert TopicReport("t", figures[:2], Refusals(0, 0)).ok
    assert not TopicReport("t", figures, Refusals(0, 0)).ok
    assert not ConformReport((TopicReport("t", (), Refusals(2, 1)),)).ok
