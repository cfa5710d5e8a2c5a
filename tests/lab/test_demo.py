"""The demo for real on a tiny model: what it reports, what it leaves behind, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_chat_model import write_tiny_chat_model

from kvstrata.cli import ExitCode, main
from kvstrata.errors import ConfigurationError
from kvstrata.lab import demo_process
from kvstrata.lab.demo import DemoOptions, run_demo
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import CollectOutcome, Store

TOKENS, NEW = 2400, 6
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
PROGRAM = [sys.executable, "-c", "import sys; from kvstrata.cli import main; sys.exit(main())"]
KEYS = {
    "model", "dtype", "history_tokens", "history_bytes", "device_budget_bytes", "peak_device_bytes",
    "rss_growth_bytes", "cold_first_token_s", "restored_first_token_s", "stock_first_token_s", "restored_tokens",
    "recomputed_tokens", "same_tokens", "max_logprob_difference", "decode_ms_per_token",
    "resident_decode_ms_per_token", "baseline_decode_ms_per_token", "stock_rss_growth_bytes", "ledger", "checks",
    "environment", "answer", "expected_answer", "stage_seconds", "restores",
}  # fmt: skip
JUDGED_BY_TIME = ("sooner", "no slower")


def _quiet(stage: str, what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    """One run of the command: exit code, what it printed, and its directory."""
    out = tmp_path_factory.mktemp("demo")
    sizes = ["--tokens", str(TOKENS), "--new-tokens", str(NEW)]
    arguments = ["demo", "--out", str(out), "--json", "--quick", "--model", str(model), "--restores", "2", *sizes]
    done = subprocess.run(
        [*PROGRAM, *arguments, "--store", str(out / "kept")], capture_output=True, env=ENVIRONMENT, check=False
    )
    return done.returncode, json.loads(done.stdout), out


def test_the_summary_has_every_key_and_is_what_was_printed(run: tuple[int, dict[str, Any], Path]) -> None:
    _, summary, out = run
    assert summary.keys() >= KEYS
    assert {key for key in KEYS if summary[key] is None} == set()
    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == summary


def test_checks_that_do_not_depend_on_the_machines_speed_pass(run: tuple[int, dict[str, Any], Path]) -> None:
    code, summary, _ = run
    failed = [check["name"] for check in summary["checks"] if check["ok"] is False]
    assert [name for name in failed if not any(words in name for words in JUDGED_BY_TIME)] == []
    assert code == (ExitCode.CHECK_FAILED if failed else ExitCode.OK)
    assert len(summary["checks"]) == 11


def test_numbers_agree_with_each_other(run: tuple[int, dict[str, Any], Path]) -> None:
    _, summary, _ = run
    row_bytes = 16 * 2 * 2 * 16 * 4
    assert summary["history_tokens"] == TOKENS + NEW - 1
    assert summary["history_bytes"] == summary["history_tokens"] * row_bytes
    assert summary["device_budget_bytes"] == summary["history_bytes"] // 4
    assert summary["restored_tokens"] == TOKENS - 1
    assert summary["ledger"]["tokens_computed"] == NEW
    assert summary["cold_ledger"]["tokens_computed"] == TOKENS + NEW - 1
    assert max(point["device_bytes"] for point in summary["trace"]) <= summary["peak_device_bytes"]
    assert summary["trace"][-1]["tokens"] == summary["history_tokens"]
    assert summary["stock_same_tokens"] is True


def test_each_restored_process_gives_the_cold_answer_from_what_the_one_before_saved(
    run: tuple[int, dict[str, Any], Path],
) -> None:
    _, summary, out = run
    assert len(summary["restores"]) == 2
    for restored in summary["restores"]:
        assert restored["first_token_s"] > 0
        assert restored | {"first_token_s": 0} == {
            "first_token_s": 0,
            "restored_tokens": TOKENS - 1,
            "recomputed_tokens": 0,
            "same_tokens": True,
            "max_logprob_difference": 0.0,
        }
    first = summary["restores"][0]
    for key, value in first.items():
        assert summary[f"restored_{key}" if key == "first_token_s" else key] == value
    assert list(summary["stage_seconds"]) == ["prepare", "cold", "restored", "restored-2", "stock", "timing"]
    with Store(out / "kept", create=False) as store:
        (saved,) = SessionStore(store).list()
    assert len(saved.sequences) == 3


def test_only_the_results_and_the_store_that_was_named_are_left(run: tuple[int, dict[str, Any], Path]) -> None:
    _, summary, out = run
    assert sorted(path.name for path in out.iterdir()) == ["kept", "report.html", "summary.json"]
    with Store(out / "kept", create=False) as store:
        assert all(verdict.sound for verdict in store.verify())
        assert SessionStore(store).load("demo").frontier == summary["history_tokens"]


@pytest.mark.slow
def test_a_refused_model_is_told_and_the_summary_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path), "--json", "--model", "/no/such/model"]) == ExitCode.REFUSED
    captured = capsys.readouterr()
    assert json.loads(captured.out)["failure"]["reason"] == "model_unavailable"
    assert "/no/such/model" in captured.err
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert written["checks"][0]["ok"] is False
    assert written.keys() >= KEYS
    assert "/no/such/model" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_says_how_long_it_may_be(model: Path, tmp_path: Path) -> None:
    outcome = run_demo(DemoOptions(tmp_path, model=str(model), tokens=5000, new_tokens=6), _quiet)
    assert outcome.failure is not None
    assert outcome.failure.error is not None
    assert outcome.failure.error.reason == "context_exceeded"
    assert "--tokens 4090" in outcome.failure.error.next_step


@pytest.mark.slow
def test_a_killed_stage_becomes_a_message(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen, children = subprocess.Popen, []

    def started(command: list[str], **options: Any) -> Any:
        children.append(popen(command, **options))
        return children[-1]

    def killing(stage: str, what: str, done: int, total: int) -> None:
        if stage == "cold":
            children[-1].send_signal(signal.SIGKILL)

    monkeypatch.setattr(demo_process.subprocess, "Popen", started)
    outcome = run_demo(DemoOptions(tmp_path, model=str(model), tokens=TOKENS), killing)
    assert outcome.failure is not None
    assert (outcome.failure.stage, outcome.failure.error) == ("cold", None)
    assert "SIGKILL" in outcome.failure.detail
    assert outcome.summary["dtype"] is not None
    assert outcome.summary["history_tokens"] is None
    assert not outcome.passed
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_ctrl_c_ends_the_children_and_leaves_a_readable_store(model: Path, tmp_path: Path) -> None:
    arguments = ["demo", "--out", str(tmp_path / "out"), "--model", str(model), "--tokens", str(TOKENS)]
    with subprocess.Popen(
        [*PROGRAM, *arguments, "--store", str(tmp_path / "store")], stderr=subprocess.PIPE, env=ENVIRONMENT, text=True
    ) as parent:
        assert parent.stderr is not None
        for line in parent.stderr:
            if line.startswith("cold: reading"):
                parent.send_signal(signal.SIGINT)
                break
        rest = parent.stderr.read()
        assert parent.wait() == ExitCode.INTERRUPTED
    assert "interrupted" in rest
    assert "Traceback" not in rest
    with Store(tmp_path / "store", create=False) as store:
        assert all(verdict.sound for verdict in store.verify())
        assert store.collect(()).outcome is CollectOutcome.DONE, "a child still holds the store"


@pytest.mark.parametrize("field", ["tokens", "new_tokens", "restores"])
def test_lengths_that_make_no_sense_are_refused(tmp_path: Path, field: str) -> None:
    options = DemoOptions(tmp_path, **{field: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=f"{field} is 0"):
        run_demo(options, _quiet)


def test_an_out_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "file"
    out.write_text("mine", encoding="utf-8")
    assert main(["demo", "--out", str(out)]) == ExitCode.USAGE
    assert "cannot be written" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "mine"


@pytest.mark.slow
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left, foreign = tmp_path / "run-999999999", tmp_path / "run-notes"
    for directory in (left, foreign):
        directory.mkdir()
    (left / "job.json").write_text("{}", encoding="utf-8")
    run_demo(DemoOptions(tmp_path, model="/no/such/model"), _quiet)
    assert not left.exists()
    assert foreign.exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_demo_passes_its_checks_on_a_real_model(tmp_path: Path) -> None:
    outcome = run_demo(DemoOptions(tmp_path, quick=True), _quiet)
    assert outcome.failure is None
    failed = [check["name"] for check in outcome.summary["checks"] if check["ok"] is False]
    assert [name for name in failed if not any(words in name for words in JUDGED_BY_TIME)] == []
