"""The terms of use of a model are accepted by a flag of every command that loads one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstrata.cli import ExitCode, main
from kvstrata.cli.model_options import GEMMA_TERMS_VARIABLE
from kvstrata.engines.transformers.bundled_models import GEMMA_TERMS


@pytest.fixture(autouse=True)
def _nothing_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GEMMA_TERMS_VARIABLE, "")


def test_the_engine_asks_for_the_same_variable_and_names_the_flag() -> None:
    assert GEMMA_TERMS.variable == GEMMA_TERMS_VARIABLE
    assert GEMMA_TERMS.option == "--accept-gemma-terms"


@pytest.mark.parametrize("command", ["generate", "chat", "demo", "bench"])
def test_the_flag_reaches_what_the_command_starts(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--accept-gemma-terms", "--no-such-option"])
    assert os.environ[GEMMA_TERMS_VARIABLE] == ""
    # Refused before anything is loaded, but after the options were read.
    wrong = {
        "generate": [],
        "chat": ["--session", ""],
        "demo": ["--tokens", "0"],
        "bench": ["no-such-bench"],
    }[command]
    assert main([command, "--accept-gemma-terms", *wrong]) != ExitCode.OK
    assert os.environ[GEMMA_TERMS_VARIABLE] == "1"
    assert "https://ai.google.dev/gemma/terms" not in capsys.readouterr().err


def test_without_the_flag_the_terms_are_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["generate", "x", "--model", "gemma3-270m", "--store", str(tmp_path / "store")]
    assert main(start) == ExitCode.REFUSED
    told = capsys.readouterr().err
    assert "https://ai.google.dev/gemma/terms" in told
    assert "--accept-gemma-terms" in told
    assert "KVSTRATA_ACCEPT_GEMMA_TERMS=1" in told
