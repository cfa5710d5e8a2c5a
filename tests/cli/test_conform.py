"""`kvstrata conform` prints what it compared, and fails when anything differs."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from kvstrata.cli import ExitCode, main
from kvstrata.lab.conform import run_topics


@pytest.mark.parametrize("arguments", [["manifest"], []])
def test_json_has_topics_and_a_verdict(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", *arguments, "--json"]) == ExitCode.OK
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(json.dumps(run_topics(arguments).to_json()))
    assert set(data) == {"topics", "ok"}
    assert set(data["topics"][0]) == {"topic", "figures", "refusals"}


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "manifest"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "full_payload" in text
    assert "refused 20 of 20 wrong inputs" in text


def test_a_difference_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    retrieval: Any = import_module("kvstrata.store.retrieval.retrieval")
    monkeypatch.setattr(retrieval, "LOOKUP", retrieval.LOOKUP[1:])
    assert main(["conform", "manifest"]) == ExitCode.CHECK_FAILED
    assert "refused 19 of 20 wrong inputs" in capsys.readouterr().out


def test_an_unknown_topic_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "tea"]) == ExitCode.USAGE
    assert "none of manifest" in capsys.readouterr().err
