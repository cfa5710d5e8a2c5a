"""`kvstrata store` through real processes and in process: what it prints, what it returns, what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import flip, make_context, make_history, tree, write_all

from kvstrata.cli import ExitCode, main
from kvstrata.errors import Reason
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import Store

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
PROGRAM = [sys.executable, "-c", "import sys; from kvstrata.cli import main; sys.exit(main())"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with the sessions `short` (1 chunk) and `long` (the same chunk and 2 more)."""
    with Store(tmp_path / "store") as store:
        sessions = SessionStore(store, now=lambda: 0.0)
        for name, tokens in (("short", 128), ("long", 300)):
            ids = tuple(range(tokens))
            sessions.save(name, make_context(), ids, write_all(store.tier, make_history(make_context(), ids)), tokens)
    return tmp_path / "store"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def test_info_counts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys, "store", "info", "--store", path)
    assert code == ExitCode.OK
    assert (data["chunks"], data["sessions"], data["snapshots"], data["read_only"]) == (3, 2, 2, False)
    assert data["total_bytes"] == sum(len(content) for content in tree(path).values())
    code, out, err = run(capsys, "store", "info", "--store", path)
    assert (code, err) == (ExitCode.OK, "")
    assert "2 with 2 snapshots" in out


def test_ls_names_the_sessions(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys, "store", "ls", "--store", path)
    assert code == ExitCode.OK
    assert {item["name"]: item["tokens"] for item in data["sessions"]} == {"short": 128, "long": 300}
    assert data["sessions"][0]["saved"] == "1970-01-01T00:00:00+00:00"
    _, out, _ = run(capsys, "store", "ls", "--store", path)
    assert "short" in out
    assert "id:test" in out


def test_the_store_may_be_named_by_the_environment(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTRATA_STORE", str(path))
    assert run_json(capsys, "store", "info")[1]["chunks"] == 3


def test_names_with_markup_and_other_scripts_are_printed_as_they_are(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["[bold red]x[/]", "имя :smile:", "../up"]
    with Store(path) as store:
        for name in names:
            SessionStore(store).save(name, make_context(), (), (), 0)
    code, out, _ = run(capsys, "store", "ls", "--store", path)
    assert code == ExitCode.OK
    assert all(name in out for name in names)
    code, data = run_json(capsys, "store", "rm", "../up", "--store", path)
    assert (code, data["session_removed"]) == (ExitCode.OK, True)


def test_verify_of_a_sound_store(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(path)
    code, data = run_json(capsys, "store", "verify", "--store", path)
    assert (code, data["ok"], data["chunks"], data["damaged"], data["sessions"]) == (ExitCode.OK, True, 3, [], [])
    assert "3 of 3 chunks are sound" in run(capsys, "store", "verify", "--store", path)[1]
    assert tree(path) == before


def test_verify_finds_damage_and_sets_it_aside_when_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(path) as store:
        bad = SessionStore(store).load("long").chunks[1]
        flip(store.tier.path(bad), 9000)
    code, data = run_json(capsys, "store", "verify", "--store", path)
    assert (code, data["ok"], data["set_aside"]) == (ExitCode.CHECK_FAILED, False, 0)
    assert [(item["chunk"], item["reason"]) for item in data["damaged"]] == [(bad.hex(), Reason.CHUNK_DAMAGED)]
    assert [(item["name"], item["usable_tokens"]) for item in data["sessions"]] == [("long", 128)]
    code, out, _ = run(capsys, "store", "verify", "--set-aside", "--store", path)
    assert code == ExitCode.CHECK_FAILED
    assert bad.hex() in out
    code, data = run_json(capsys, "store", "verify", "--store", path)
    assert (code, data["damaged"]) == (ExitCode.CHECK_FAILED, [])
    assert [item["reason"] for item in data["sessions"]] == [Reason.CHUNK_MISSING]


def test_verify_repairs_what_does_not_agree(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(path) as store:
        chunk = SessionStore(store).load("long").chunks[2]
        stray = make_history(make_context(), tuple(range(500, 600)))[0]
        store.tier.write(*stray.arguments)
        raw = store.tier.path(stray.digest).read_bytes()
        store.evict([stray.digest])
        store.tier.path(stray.digest).write_bytes(raw)
    code, data = run_json(capsys, "store", "verify", "--store", path)
    assert (code, data["ok"], data["repaired"]) == (ExitCode.CHECK_FAILED, False, 0)
    assert [(item["kind"], item["subject"]) for item in data["findings"]] == [("orphan_file", stray.digest.hex())]
    assert "--repair" in run(capsys, "store", "verify", "--store", path)[1]
    code, data = run_json(capsys, "store", "verify", "--repair", "--store", path)
    assert (code, data["ok"], data["repaired"]) == (ExitCode.OK, True, 1)
    code, data = run_json(capsys, "store", "verify", "--store", path)
    assert (code, data["findings"]) == (ExitCode.OK, [])
    (path / "catalog.sqlite").write_bytes(b"noise")
    code, data = run_json(capsys, "store", "verify", "--store", path)
    assert (code, data["catalog_rebuilt"], data["chunks"]) == (ExitCode.OK, True, 3)
    with Store(path) as store:
        assert store.tier.has(chunk)


def test_verify_finds_a_damaged_manifest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(next(path.glob("sessions/*/1.json")), 50)
    code, data = run_json(capsys, "store", "verify", "--store", path)
    assert code == ExitCode.CHECK_FAILED
    assert [item["reason"] for item in data["sessions"]] == [Reason.SESSION_DAMAGED]
    code, out, _ = run(capsys, "store", "ls", "--store", path)
    assert code == ExitCode.OK
    assert "damaged: 1" in out


def test_rm_frees_only_what_no_other_session_needs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys, "store", "rm", "long", "--store", path)
    assert code == ExitCode.OK
    assert (data["snapshots_removed"], data["collected"]["chunks_removed"]) == (1, 2)
    code, out, err = run(capsys, "store", "rm", "short", "--store", path)
    assert (code, err) == (ExitCode.OK, "")
    assert "1 chunks collected" in out
    assert run_json(capsys, "store", "info", "--store", path)[1]["chunks"] == 0


def test_rm_while_the_store_is_used_keeps_the_chunks_for_later(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(path):
        code, data = run_json(capsys, "store", "rm", "long", "--store", path)
        assert (code, data["collected"]["reason"]) == (ExitCode.OK, Reason.STORE_BUSY)
        assert run(capsys, "store", "collect", "--store", path)[0] == ExitCode.CHECK_FAILED
    code, data = run_json(capsys, "store", "collect", "--store", path)
    assert (code, data["collected"]["chunks_removed"]) == (ExitCode.OK, 2)


MISTAKES = [
    (["store", "ls", "--store", "{tmp}/none"], ExitCode.STORE, Reason.STORE_MISSING),
    (["store", "info", "--store", "{tmp}/file"], ExitCode.STORE, Reason.STORE_NOT_A_DIRECTORY),
    (["store", "verify", "--store", "{tmp}/foreign"], ExitCode.STORE, Reason.STORE_FOREIGN),
    (["store", "rm", "none", "--store", "{tmp}/store"], ExitCode.SESSION, Reason.SESSION_UNKNOWN),
    (["store", "rm", "long", "--sequence", "9", "--store", "{tmp}/store"], ExitCode.SESSION, Reason.SESSION_UNKNOWN),
    (["store", "rm", "long", "--tenant", "bob", "--store", "{tmp}/store"], ExitCode.SESSION, Reason.SESSION_UNKNOWN),
    (["store", "rm", "a\nb", "--store", "{tmp}/store"], ExitCode.SESSION, Reason.SESSION_NAME_INVALID),
    (["store", "rm", "", "--store", "{tmp}/store"], ExitCode.SESSION, Reason.SESSION_NAME_INVALID),
    (["store", "rm", "--store", "{tmp}/store"], ExitCode.USAGE, Reason.INVALID_ARGUMENT),
    (["store", "rm", "x", "--sequence", "one", "--store", "{tmp}/store"], ExitCode.USAGE, Reason.INVALID_ARGUMENT),
    (["store", "nonsense"], ExitCode.USAGE, Reason.INVALID_ARGUMENT),
    (["nonsense"], ExitCode.USAGE, Reason.INVALID_ARGUMENT),
    (["store", "ls", "--nonsense"], ExitCode.USAGE, Reason.INVALID_ARGUMENT),
]


@pytest.mark.parametrize(("arguments", "code", "reason"), MISTAKES)
def test_a_mistake_is_one_message_and_an_exit_code(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: ExitCode, reason: Reason
) -> None:
    (path.parent / "file").write_text("mine")
    (path.parent / "foreign").mkdir()
    (path.parent / "foreign" / "photo.jpg").write_text("mine")
    filled = [argument.replace("{tmp}", str(path.parent)) for argument in arguments]
    before = tree(path.parent)
    found, out, err = run(capsys, *filled)
    assert (found, out) == (code, "")
    assert err.strip()
    assert "Traceback" not in err
    found, data = run_json(capsys, *filled)
    assert (found, data["error"]["reason"]) == (code, reason)
    assert data["error"]["cause"]
    assert data["error"]["next_step"]
    assert tree(path.parent) == before


@pytest.mark.parametrize("command", [[], ["store"], *([["store", name] for name in ("info", "ls", "verify", "rm")])])
def test_help_is_there(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *command, "--help")
    assert (code, err) == (ExitCode.OK, "")
    assert "Usage" in out
    if len(command) == 2:
        assert f"kvstrata store {command[1]}" in out.replace("│", "").split("Example")[1]


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == ExitCode.OK
    assert "store" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == ExitCode.OK
    assert out.startswith("kvstrata ")


def test_ctrl_c_is_no_traceback(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Store, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "verify", interrupted)
    code, out, err = run(capsys, "store", "verify", "--store", path)
    assert (code, out) == (ExitCode.INTERRUPTED, "")
    assert "interrupted" in err


@pytest.mark.parametrize(
    "command",
    [
        ["store", "ls", "--store", "{path}"],
        ["store", "verify", "--store", "{path}", "--json"],
        ["store", "--help"],
    ],
)
def test_a_reader_that_has_gone_is_no_error(path: Path, command: list[str]) -> None:
    arguments = [argument.replace("{path}", str(path)) for argument in command]
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [*PROGRAM, *arguments], env=ENVIRONMENT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (ExitCode.OK, "")


def test_an_output_without_unicode_is_no_traceback(path: Path) -> None:
    with Store(path) as store:
        SessionStore(store).save("имя", make_context(), (), (), 0)
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        [*PROGRAM, "store", "ls", "--store", str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (ExitCode.OK, "")
    assert "\\u0438" in result.stdout


def test_the_store_commands_run_without_pytorch(path: Path) -> None:
    code = (
        f"import sys; from kvstrata.cli import main; code = main(['store', 'ls', '--store', {str(path)!r}]);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False).returncode == 0
