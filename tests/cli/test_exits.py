"""Every error has an exit code that a script can tell apart."""

from __future__ import annotations

import importlib.abc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.cli import main
from kvstrata.cli.exits import ExitCode, exit_code
from kvstrata.errors import (
    BudgetError,
    ConfigurationError,
    DamagedError,
    KernelUnavailable,
    KvstrataError,
    ModelLoadError,
    Reason,
    SessionError,
    StateError,
    StoreError,
    UnsupportedError,
)
from kvstrata.store import Store


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConfigurationError, ExitCode.USAGE),
        (UnsupportedError, ExitCode.REFUSED),
        (StateError, ExitCode.REFUSED),
        (KernelUnavailable, ExitCode.REFUSED),
        (ModelLoadError, ExitCode.REFUSED),
        (StoreError, ExitCode.STORE),
        (DamagedError, ExitCode.STORE),
        (SessionError, ExitCode.SESSION),
        (BudgetError, ExitCode.BUDGET),
    ],
)
def test_exit_codes(kind: type[KvstrataError], code: ExitCode) -> None:
    assert exit_code(kind(Reason.CLOSED, "cause")) is code


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", ""],
        ["generate", "x", "--max-new-tokens", "0"],
        ["generate", "x", "--temperature", "-1"],
        ["generate", "x", "--temperature", "nan"],
        ["generate", "x", "--seed", str(2**64)],
        ["generate", "x", "--budget", "lots"],
        ["generate", "x", "--dtype", "int8"],
        ["generate", "--file", "/no/such/file"],
        ["chat", "--temperature", "nan"],
        ["chat", "--budget", "-1MiB"],
        ["demo", "--out", "{tmp}/out", "--tokens", "0"],
        ["demo", "--out", "{tmp}/out", "--restores", "0"],
        ["demo", "--out", "{tmp}/file"],
        ["bench", "no-such-bench"],
        ["bench", "decode", "--tokens", "0"],
        ["bench", "store", "--dtype", "float32"],
        ["bench", "decode", "--quick"],
        ["bench", "methods", "--rounds", "3"],
        ["bench", "needles", "--rounds", "3"],
        ["store", "rm"],
        ["store", "ls", "--no-such-option"],
        ["no-such-command"],
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_wrong_on_the_command_line_ends_alike_and_before_anything_slow(
    arguments: list[str], as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main(filled + ["--json"] * as_json) == ExitCode.USAGE
    captured = capsys.readouterr()
    for words in ("loading", "bench ", "starting", "Traceback"):
        assert words not in captured.err.replace("kvstrata bench", "")
    if as_json:
        assert json.loads(captured.out)["error"]["reason"] in (Reason.INVALID_ARGUMENT, Reason.EMPTY_PROMPT)


def test_ctrl_c_with_json_prints_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    with Store(tmp_path / "store"):
        monkeypatch.setattr(Store, "usage", interrupted)
    assert main(["store", "info", "--store", str(tmp_path / "store"), "--json"]) == ExitCode.INTERRUPTED
    assert json.loads(capsys.readouterr().out) == {"interrupted": True}


@pytest.mark.parametrize("place", ["kvstrata.cli.app", "kvstrata.cli.doctor"])
def test_ctrl_c_while_modules_are_still_loading_is_no_traceback(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    class Interrupting(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == place:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, place, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert main(["doctor"]) == ExitCode.INTERRUPTED


def test_without_its_extra_the_command_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "kvstrata.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["doctor"]) == ExitCode.REFUSED
    assert "pip install 'kvstrata[cli]'" in capsys.readouterr().err


def test_a_closed_stdout_is_no_error() -> None:
    """What `kvstrata --version >&-` starts with."""
    script = "import sys; sys.stdout = None; from kvstrata.cli import main; sys.exit(main(['--version']))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (ExitCode.OK, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_full_stdout_is_one_message(tmp_path: Path, extra: list[str]) -> None:
    code = "import sys; from kvstrata.cli import main; sys.exit(main())"
    with Store(tmp_path / "store"), Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "store", "ls", "--store", str(tmp_path / "store"), *extra],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 4
    assert "stdout cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
