"""`kvstrata chat` with lines on stdin: several turns on one request, saved and continued."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_chat_model import write_tiny_chat_model

from kvstrata.cli import ExitCode, main
from kvstrata.engines.transformers.conversation import Conversation
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import Store

WORDS = "a fairly long line so that more than one page of rows is written to the store "
LINES = [f"{WORDS * 3}{number}" for number in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("model"), layers=4)


class Chat:
    """Runs `chat` on lines and returns its events."""

    def __init__(
        self, model: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.model, self.store = model, store
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.code = -1
        self.err = ""

    def __call__(self, lines: list[str], *arguments: str, raw: bytes = b"") -> list[dict[str, Any]]:
        out = self.text(lines, "--json", *arguments, raw=raw)
        return [json.loads(line) for line in out.splitlines()]

    def text(self, lines: list[str], *arguments: str, raw: bytes = b"") -> str:
        stdin = raw or "".join(line + "\n" for line in lines).encode()
        self._monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        common = ["--model", str(self.model), "--store", str(self.store), "--max-new-tokens", "5"]
        self.code = main(["chat", *common, *arguments])
        captured = self._capsys.readouterr()
        self.err = captured.err
        return captured.out

    def stored(self, name: str) -> list[int]:
        with Store(self.store, create=False) as store:
            return list(SessionStore(store).load(name).token_ids)


@pytest.fixture
def chat(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    return Chat(model, tmp_path / "store", monkeypatch, capsys)


def _of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_each_turn_computes_only_what_it_adds(chat: Chat) -> None:
    turns = _of(chat(LINES), "turn")
    assert chat.code == ExitCode.OK
    assert [turn["turn"] for turn in turns] == [1, 2, 3]
    assert turns[0]["kept_tokens"] == 0
    for before, after in itertools.pairwise(turns):
        assert after["kept_tokens"] == before["prompt_tokens"] + len(before["tokens"]) - 1
        assert after["computed_tokens"] == after["prompt_tokens"] - after["kept_tokens"]


def test_a_saved_conversation_goes_on_as_if_it_had_never_stopped(chat: Chat) -> None:
    whole = _of(chat(LINES), "turn")
    first = chat(LINES[:2], "--session", "talk")
    assert first[-1]["event"] == "saved"
    again = chat(LINES[2:], "--session", "talk")
    restored, turn = again[0], again[1]
    assert (restored["event"], restored["restored_tokens"]) == ("restored", first[-1]["frontier"])
    assert turn["kept_tokens"] == restored["stored_tokens"]
    assert turn["tokens"] == whole[2]["tokens"]
    assert turn["prompt_tokens"] == whole[2]["prompt_tokens"]


def test_text_mode_says_how_many_tokens_came_back(chat: Chat) -> None:
    out = chat.text(LINES[:1], "--session", "talk")
    assert out.endswith("\n")
    assert "tokens saved" in chat.err
    chat.text(LINES[1:2], "--session", "talk")
    count = _of(chat([], "--session", "talk"), "restored")
    assert "tokens came back" in chat.err or count
    assert count[0]["restored_tokens"] == count[0]["stored_tokens"]


def test_commands(chat: Chat) -> None:
    out = chat.text(["/help", "/nonsense", LINES[0], "/ledger", "/save other", "/quit", "never read"])
    assert chat.code == ExitCode.OK
    assert "/save [NAME]" in chat.err
    assert "/nonsense is not known" in chat.err
    assert "device_bytes" in chat.err
    assert chat.stored("other")
    assert len(out.splitlines()) >= 1
    events = chat(["/ledger", "/quit", "never read"])
    assert [event["event"] for event in events] == ["ledger"]


def test_nothing_said_saves_nothing(chat: Chat) -> None:
    assert chat([], "--session", "talk") == []
    assert chat.code == ExitCode.OK


def test_bad_lines_are_refused_and_the_conversation_goes_on(chat: Chat) -> None:
    events = chat([], raw=b"\xff\xfe\n" + b"x" * 5000 + b"\nhello\n")
    assert [event["event"] for event in events] == ["error", "error", "turn"]
    assert events[1]["error"]["reason"] == "context_exceeded"
    assert chat.code == ExitCode.USAGE


def test_ctrl_c_in_an_answer_keeps_what_was_said(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    say = Conversation.say

    def interrupted(self: Conversation, text: str, **options: Any) -> Any:
        if text == LINES[1]:
            say(self, text, **(options | {"max_new_tokens": 2}))
            raise KeyboardInterrupt
        return say(self, text, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Conversation, "say", interrupted)
        events = chat(LINES, "--session", "talk")
    assert chat.code == ExitCode.INTERRUPTED
    assert [event["event"] for event in events] == ["turn", "saved", "interrupted"]
    stored = chat.stored("talk")
    assert _of(chat([LINES[2]], "--session", "talk"), "turn")[0]["kept_tokens"] == len(stored)


def test_a_session_of_another_model_is_refused_by_name(chat: Chat) -> None:
    chat(LINES[:1], "--session", "talk", "--dtype", "float32")
    chat.text(LINES[1:2], "--session", "talk", "--dtype", "bfloat16")
    assert chat.code == ExitCode.SESSION
    assert "float32" in chat.err
    assert "bfloat16" in chat.err


def test_a_damaged_chunk_is_computed_again(chat: Chat) -> None:
    whole = _of(chat(LINES), "turn")
    chat(LINES[:2], "--session", "talk")
    chunks = sorted(path for path in (chat.store / "chunks").rglob("*") if path.is_file())
    victim = max(chunks, key=lambda path: path.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[-100] ^= 1
    victim.write_bytes(raw)
    turn = _of(chat(LINES[2:], "--session", "talk"), "turn")[0]
    assert turn["tokens"] == whole[2]["tokens"]


def test_a_model_without_template_chats_in_plain_lines(chat: Chat, tmp_path: Path) -> None:
    chat.model = write_tiny_chat_model(tmp_path / "plain", layers=2, template=None)
    turns = _of(chat(["hello", "again"]), "turn")
    assert turns[0]["prompt_tokens"] == len("User: hello\nAssistant: ")
    assert turns[1]["kept_tokens"] > 0
