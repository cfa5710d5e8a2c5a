"""The topic agrees with what was published, and says so when it does not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from kvstrata.errors import ConfigurationError
from kvstrata.lab.conform import TOPICS, run_topics
from kvstrata.lab.conform.manifest_mutations import MUTATIONS
from kvstrata.lab.conform.result import load_topic

manifest: Any = import_module("kvstrata.lab.conform.manifest")


def test_every_figure_agrees_and_every_wrong_input_is_refused() -> None:
    report = run_topics(["manifest"])
    assert report.ok
    (topic,) = report.to_json()["topics"]
    assert topic["topic"] == "manifest"
    assert [figure["ok"] for figure in topic["figures"]] == [True] * 11
    assert topic["refusals"] == {"expected": 20, "refused": 20, "failed": []}


def test_every_wrong_input_of_the_data_is_provoked_once() -> None:
    assert [mutation.field for mutation in MUTATIONS] == [item["field"] for item in load_topic("manifest")["refusals"]]


def test_a_check_that_is_gone_fails_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    retrieval: Any = import_module("kvstrata.store.retrieval.retrieval")
    kept = tuple(check for check in retrieval.LOOKUP if check.__name__ != "fallback")
    monkeypatch.setattr(retrieval, "LOOKUP", kept)
    report = run_topics(["manifest"])
    assert not report.ok
    (topic,) = report.topics
    assert topic.refusals.failed == (
        {"field": "operation.fallback", "expected": "undeclared_fallback", "found": "accepted"},
    )
    assert [figure.key for figure in topic.figures if not figure.ok] == ["invalid_rejected"]


def test_another_input_gives_another_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_topic("manifest")
    data["fixture"]["generations"]["cache"] = 24
    data["refusals"] = []
    monkeypatch.setattr(manifest, "load_topic", lambda name: data)
    differing = [figure.key for figure in manifest.conform_manifest().figures if not figure.ok]
    assert differing == ["generations", "invalid_rejected"]


def test_an_unknown_topic_is_named() -> None:
    with pytest.raises(ConfigurationError, match="topic 'tea' does not exist"):
        run_topics(["tea"])


def test_every_topic_has_data_and_reports_progress() -> None:
    seen: list[tuple[int, int]] = []
    run_topics(progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(TOPICS)) for done in range(1, len(TOPICS) + 1)]
    assert all(load_topic(name)["topic"] == name for name in TOPICS)
