"""Prompts of a conversation only ever grow, and equal the template's own text where tokens are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_chat_model import TEMPLATE, write_tiny_chat_model

from kvstrata.engines.transformers import load_model
from kvstrata.engines.transformers.turns import Turns
from kvstrata.errors import Reason, UnsupportedError

REWRITING = "{{ messages | length }}" + TEMPLATE


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = write_tiny_chat_model(tmp_path_factory.mktemp("model"), layers=1)
    return load_model(path, dtype="float32").tokenizer


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("ended", [True, False])
def test_the_whole_conversation_is_what_the_template_writes(tokenizer: Any, ended: bool) -> None:
    turns = Turns(tokenizer)
    answer = [*_ids(tokenizer, "yes"), *([tokenizer.eos_token_id] if ended else [])]
    history = turns.closed(turns.prompt("one?"), answer)
    said = [("user", "one?"), ("assistant", "yes"), ("user", "two?")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in said], tokenize=False, add_generation_prompt=True
    )
    assert turns.is_closed(history)
    assert turns.next_prompt(history, "two?") == _ids(tokenizer, text)
    assert turns.next_prompt(history, "two?")[: len(history)] == history


def test_an_answer_that_was_cut_short_is_not_closed(tokenizer: Any) -> None:
    turns = Turns(tokenizer)
    assert not turns.is_closed([*turns.prompt("one?"), *_ids(tokenizer, "ye")])


def test_without_a_template_turns_are_plain_lines(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    turns = Turns(tokenizer)
    history = turns.closed(turns.prompt("one?"), _ids(tokenizer, "yes"))
    expected = "User: one?\nAssistant: yes\nUser: two?\nAssistant: "
    assert tokenizer.decode(turns.next_prompt(history, "two?")) == expected


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", REWRITING)
    with pytest.raises(UnsupportedError) as refused:
        Turns(tokenizer)
    assert refused.value.reason is Reason.OPERATION_UNSUPPORTED
