"""`kvstrata generate`: the answer, the session, and what is refused before anything slow."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_chat_model import CONTEXT, write_tiny_chat_model

from kvstrata.cli import ExitCode, main
from kvstrata.engines.transformers import Memory
from kvstrata.engines.transformers.generation import _Stream
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import Store

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
PROGRAM = [sys.executable, "-c", "import sys; from kvstrata.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("model"), layers=4)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _generate(model: Path, store: Path, *arguments: str) -> int:
    common = ("--model", str(model), "--store", str(store), "--max-new-tokens", "6")
    return main(["generate", *arguments, *common])


def _stdin(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_json_says_what_was_done(model: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate(model, store, PROMPT, "--json") == ExitCode.OK
    found = _json(capsys)
    assert {"text", "tokens", "receipts", "ledger", "timings", "dtype", "model"} <= found.keys()
    assert 1 <= len(found["tokens"]) <= 6
    assert found["receipts"] == {"restore": None, "save": None}
    assert found["ledger"]["tokens_computed"] == found["prompt_tokens"] + len(found["tokens"]) - 1
    assert not store.exists() or not SessionStore(Store(store)).list()


def test_text_goes_to_stdout_and_the_rest_to_stderr(
    model: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _generate(model, store, PROMPT, "--json") == ExitCode.OK
    text = _json(capsys)["text"]
    assert _generate(model, store, PROMPT) == ExitCode.OK
    streamed = capsys.readouterr()
    assert streamed.out == text + "\n"
    assert "loading" in streamed.err


@pytest.mark.parametrize("budget", [None, "3200KiB"])
def test_a_session_comes_back_in_another_process_with_the_same_answer(
    model: Path, store: Path, budget: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    limited = ["--budget", budget] if budget else []
    assert _generate(model, store, PROMPT, "--json", "--session", "s", *limited) == ExitCode.OK
    first = _json(capsys)
    arguments = ["generate", PROMPT, "--json", "--session", "s", "--max-new-tokens", "6", *limited]
    again = subprocess.run(
        [*PROGRAM, *arguments, "--model", str(model), "--store", str(store)],
        capture_output=True,
        env=ENVIRONMENT,
        check=True,
    )
    second = json.loads(again.stdout)
    assert second["tokens"] == first["tokens"]
    assert second["receipts"]["restore"]["restored_tokens"] == first["prompt_tokens"] - 1
    assert second["kept_tokens"] == first["prompt_tokens"] - 1
    assert second["ledger"]["tokens_computed"] == len(second["tokens"])


def test_a_prompt_that_differs_uses_the_common_part_and_gets_its_own_answer(
    model: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = PROMPT + "But the dog was not asleep at all."
    assert _generate(model, store, other, "--json") == ExitCode.OK
    alone = _json(capsys)
    assert _generate(model, store, PROMPT, "--json", "--session", "s") == ExitCode.OK
    common = _json(capsys)["prompt_tokens"] - len("<|>\n<|>assistant\n")
    assert _generate(model, store, other, "--json", "--session", "s") == ExitCode.OK
    shared = _json(capsys)
    assert shared["tokens"] == alone["tokens"]
    assert 0 < common <= shared["kept_tokens"] < shared["prompt_tokens"]


def test_the_prompt_may_come_from_a_file_or_stdin(
    model: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    answers = []
    _stdin(monkeypatch, PROMPT.encode())
    for arguments in ([PROMPT], ["--file", str(file)], ["-"]):
        assert _generate(model, store, *arguments, "--json") == ExitCode.OK
        answers.append(_json(capsys)["tokens"])
    assert answers[0] == answers[1] == answers[2]


def test_raw_text_is_not_put_into_the_template(model: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate(model, store, "abc", "--json", "--raw") == ExitCode.OK
    assert _json(capsys)["prompt_tokens"] == len("abc")


def test_sampling_repeats_with_its_seed(model: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for seed in ("1", "1", "2"):
        assert _generate(model, store, PROMPT, "--json", "--temperature", "2", "--seed", seed) == ExitCode.OK
        runs.append(_json(capsys)["tokens"])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ([""], ExitCode.USAGE, "empty_prompt"),
        ([" \n "], ExitCode.USAGE, "empty_prompt"),
        (["\udcff"], ExitCode.USAGE, "invalid_argument"),
        (["x", "--dtype", "int8"], ExitCode.USAGE, "invalid_argument"),
        (["x", "--budget", "lots"], ExitCode.USAGE, "invalid_argument"),
        (["x" * CONTEXT], ExitCode.USAGE, "context_exceeded"),
        (["x", "--model", "/no/such/model"], ExitCode.REFUSED, "model_unavailable"),
    ],
)
def test_refusals_name_their_reason(
    model: Path, store: Path, arguments: list[str], code: ExitCode, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["generate", "--json", "--store", str(store), "--model", str(model)]
    assert main([*start, *arguments]) == code
    assert _json(capsys)["error"]["reason"] == reason


def test_bad_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\xe9".encode("latin-1"))
    for path, words in ((tmp_path / "absent", "cannot be read"), (tmp_path, "cannot be read"), (latin, "not UTF-8")):
        assert main(["generate", "--file", str(path)]) == ExitCode.USAGE
        assert words in capsys.readouterr().err


def test_no_prompt_and_two_prompts_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate"]) == ExitCode.USAGE
    assert main(["generate", "x", "--file", "y"]) == ExitCode.USAGE
    assert "either PROMPT" in capsys.readouterr().err


def test_a_small_budget_says_what_would_do(model: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate(model, store, PROMPT, "--json", "--budget", "1MiB") == ExitCode.BUDGET
    error = _json(capsys)["error"]
    assert error["reason"] == "budget_too_small"
    assert "budget=" in error["next_step"]


def test_an_illegal_session_name_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--session", "", "--model", "/no/such/model"]) == ExitCode.SESSION
    assert "session_name_invalid" in capsys.readouterr().err


def test_what_was_read_before_ctrl_c_is_saved(
    model: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: object, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("kvstrata.cli.output.Output.piece", interrupt)
        assert _generate(model, store, PROMPT, "--session", "s") == ExitCode.INTERRUPTED
    capsys.readouterr()
    assert _generate(model, store, PROMPT, "--session", "s", "--json") == ExitCode.OK
    found = _json(capsys)
    assert found["kept_tokens"] == found["prompt_tokens"] - 1


@pytest.mark.parametrize("session", [[], ["--session", "s"]])
def test_ctrl_c_with_json_tells_what_was_answered_by_then(
    model: Path,
    store: Path,
    session: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _generate(model, store, PROMPT, "--json") == ExitCode.OK
    whole = _json(capsys)
    assert whole["interrupted"] is False
    assert len(whole["tokens"]) > 3
    put, seen = _Stream.put, itertools.count()

    def interrupting(self: _Stream, value: Any) -> None:
        put(self, value)
        if next(seen) == 3:  # the prompt, then two tokens, then the third
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Stream, "put", interrupting)
        assert _generate(model, store, PROMPT, "--json", *session) == ExitCode.INTERRUPTED
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["interrupted"] is True
    assert found.keys() == whole.keys()
    # The third token was chosen, but not yet computed on.
    assert found["tokens"] == whole["tokens"][:2]
    assert whole["text"].startswith(found["text"])
    assert (found["prompt_tokens"], found["ended"]) == (whole["prompt_tokens"], False)
    assert (found["receipts"]["save"] is None) is (not session)
    assert "Traceback" not in captured.err
    if session:
        assert found["receipts"]["save"]["frontier"] == found["prompt_tokens"] + 2
        assert _generate(model, store, PROMPT, "--json", *session) == ExitCode.OK
        assert _json(capsys)["tokens"] == whole["tokens"]


def test_ctrl_c_while_the_prompt_is_read_tells_that_nothing_was_answered(
    model: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: object, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Memory, "prefill", interrupt)
    assert _generate(model, store, PROMPT, "--json") == ExitCode.INTERRUPTED
    found = _json(capsys)
    assert (found["interrupted"], found["tokens"], found["text"]) == (True, [], "")
