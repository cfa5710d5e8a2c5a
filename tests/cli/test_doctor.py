"""`kvstrata doctor` says what is there, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import ExitCode, main
from kvstrata.cli.doctor import Check, State, examine
from kvstrata.store import Store


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_versions_are_those_installed() -> None:
    checks = by_name(examine(None))
    for name in ("torch", "numpy", "xxhash", "blake3", "typer"):
        assert checks[name].found == importlib.metadata.version(name)
        assert checks[name].state is State.OK
    assert {"python", "native kernels", "C++ compiler", "memory", "huge pages", "device tier", "file tier"} <= set(
        checks
    )


def test_whatever_is_not_right_comes_with_a_next_step_or_needs_none() -> None:
    for check in examine(None):
        assert check.state is not State.FAILED or check.next_step, check


@pytest.mark.parametrize(
    ("package", "state", "step"),
    [("torch", State.FAILED, "pip install torch"), ("matplotlib", State.MISSING, "pip install 'kvstrata[report]'")],
)
def test_a_missing_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, state: State, step: str
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    check = by_name(examine(None))[package]
    assert (check.state, check.next_step) == (state, step)
    code = main(["doctor"])
    assert code == (ExitCode.CHECK_FAILED if state is State.FAILED else ExitCode.OK)
    assert step in capsys.readouterr().out


def test_no_compiler_is_missing_and_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    check = by_name(examine(None))["C++ compiler"]
    assert check.state is State.MISSING
    assert check.next_step


def test_kernels_that_cannot_be_imported_are_missing_and_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstrata.kernels.native", None)
    check = by_name(examine(None))["native kernels"]
    assert check.state is State.MISSING
    assert "C++ compiler" in check.next_step


def test_a_level_that_does_not_exist_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_ISA", "nonsense")
    check = by_name(examine(None))["native kernels"]
    assert check.state is State.FAILED
    assert "nonsense" in check.found


def test_json_has_every_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    code = main(["doctor", "--store", str(tmp_path / "store"), "--json"])
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (code, data["ok"]) == (ExitCode.OK, True)
    tier = next(check for check in data["checks"] if check["name"] == "file tier")
    assert tier["state"] == "ok"
    assert str(tmp_path / "store") in tier["found"]


def test_a_store_that_cannot_be_used_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--store", str(tmp_path / "none")]) == ExitCode.CHECK_FAILED
    assert "there is no store" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
