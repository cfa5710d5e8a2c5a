"""What a conformance run reports, and when a computed value equals a published one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

__all__ = ["ConformReport", "Figure", "Refusals", "TopicReport", "agrees", "compare", "load_topic"]

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Figure:
    """One published value and ours. ok: whether they agree, `None` where nothing is there to compare with."""

    key: str
    published: Any
    computed: Any
    ok: bool | None


@dataclass(frozen=True, slots=True)
class Refusals:
    """How many wrong inputs there are, how many were refused for the stated reason, and what became of the others."""

    expected: int
    refused: int
    failed: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TopicReport:
    """One topic."""

    topic: str
    figures: tuple[Figure, ...]
    refusals: Refusals

    @property
    def ok(self) -> bool:
        """Whether no figure differs and nothing wrong was accepted."""
        refusals = self.refusals
        return all(f.ok is not False for f in self.figures) and refusals.refused == refusals.expected

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "topic": self.topic,
            "figures": [
                {"key": f.key, "published": f.published, "computed": f.computed, "ok": f.ok} for f in self.figures
            ],
            "refusals": {
                "expected": self.refusals.expected,
                "refused": self.refusals.refused,
                "failed": list(self.refusals.failed),
            },
        }


@dataclass(frozen=True, slots=True)
class ConformReport:
    """All topics of one run."""

    topics: tuple[TopicReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every topic is."""
        return all(topic.ok for topic in self.topics)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"topics": [topic.to_json() for topic in self.topics], "ok": self.ok}


def load_topic(name: str) -> dict[str, Any]:
    """The inputs, published figures and wrong inputs of a topic."""
    data: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return data


def compare(published: Sequence[Mapping[str, Any]], computed: Mapping[str, Any]) -> tuple[Figure, ...]:
    """Figures in the published order. One that we do not compute differs; one whose status is `open` is only listed."""
    figures = []
    for item in published:
        key, value = item["key"], item["published"]
        found = computed.get(key)
        ok = None if item["status"] == "open" else key in computed and agrees(value, found)
        figures.append(Figure(key, value, found, ok))
    return tuple(figures)


def agrees(published: Any, computed: Any) -> bool:
    """Whether `computed` is `published` once it is rounded to the published digits; exact for whole numbers."""
    if isinstance(published, Mapping):
        return (
            isinstance(computed, Mapping)
            and published.keys() == computed.keys()
            and all(agrees(value, computed[key]) for key, value in published.items())
        )
    if isinstance(published, list):
        return (
            isinstance(computed, list | tuple)
            and len(published) == len(computed)
            and all(map(agrees, published, computed))
        )
    if isinstance(published, bool) or not isinstance(published, int | float):
        return bool(published == computed)
    if isinstance(computed, bool) or not isinstance(computed, int | float):
        return False
    if isinstance(published, int):
        return published == computed
    exponent = Decimal(repr(published)).as_tuple().exponent
    return isinstance(exponent, int) and Decimal(computed).quantize(Decimal(1).scaleb(exponent)) == Decimal(
        repr(published)
    )
