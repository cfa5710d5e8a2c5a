"""Prose is prose, prompts have exactly the length asked for, and the fact is in them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import ConfigurationError
from kvstrata.lab.prose import Tokenizer, paragraphs, prose, reading_task


class Words:
    """A tokenizer without a chat template: one token for each run of letters or other character."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        import re
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[len(token) for token in re.findall(r"\w+|[^\w ]", text)])

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        raise ValueError("no template")


class Letters(Words):
    """One token for each character."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


class Marked(Words):
    """Begins with a marker where that is asked for."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        ids = super().__call__(text, add_special_tokens=False)
        ids.input_ids[:0] = [-1] * add_special_tokens
        return ids


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)


def test_paragraphs_are_sentences_without_code() -> None:
    text = paragraphs()
    assert len(text) == len(set(text)) > 500
    assert all(paragraph[0].isalpha() and paragraph[-1] in ".:" for paragraph in text)
    assert not any("::=" in paragraph or "\n" in paragraph or "  " in paragraph for paragraph in text)


@pytest.mark.parametrize("tokens", [1, 17, 8192])
def test_prose_has_the_length_asked_for(tokenizer: Any, tokens: int) -> None:
    ids = prose(tokens, tokenizer)
    assert len(ids) == tokens
    assert ids == prose(8192, tokenizer)[:tokens]
    assert tokenizer.decode(ids).startswith(tokenizer.decode(ids[:1]))


def test_prose_starts_where_asked(tokenizer: Any) -> None:
    assert tokenizer.decode(prose(400, tokenizer, start=5)).startswith(paragraphs()[5])


def test_there_is_prose_for_twelve_thousand_tokens_of_any_tokenizer() -> None:
    assert sum(len(paragraph.split()) for paragraph in paragraphs()) > 12_000
    assert len(reading_task(Words(), 12_000).prompt_ids) == 12_000


@pytest.mark.parametrize("tokens", [0, -1, 10_000_000])
def test_impossible_length_of_prose_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigurationError, match=f"tokens is {tokens}"):
        prose(tokens, Words())


@pytest.mark.parametrize("tokens", [128, 1024, 2400, 6144, 8191])
def test_task_has_exactly_the_tokens_of_its_text(tokenizer: Any, tokens: int) -> None:
    task = reading_task(tokenizer, tokens)
    assert len(task.prompt_ids) == tokens
    assert task.prompt_ids == tokenizer(task.text, add_special_tokens=False).input_ids
    assert task.text.endswith(f"{task.question}<|im_end|>\n<|im_start|>assistant\n")
    assert task.text.count(task.answer) == 1


@settings(max_examples=30)
@given(
    splitter=st.sampled_from([Words(), Letters(), Marked()]),
    tokens=st.integers(250, 3000),
    depth=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_task_without_a_template(splitter: Tokenizer, tokens: int, depth: float, seed: int) -> None:
    task = reading_task(splitter, tokens, depth=depth, seed=seed)
    assert len(task.prompt_ids) == tokens
    assert task == reading_task(splitter, tokens, depth=depth, seed=seed)
    assert task.text.count(task.answer) == 1


def test_task_without_a_template_begins_as_the_tokenizer_begins_a_text() -> None:
    task = reading_task(Marked(), 500)
    assert len(task.prompt_ids) == 500
    assert task.prompt_ids == [-1, *Words()(task.text, add_special_tokens=False).input_ids]


def test_depth_places_the_fact() -> None:
    places = [
        (task := reading_task(Words(), 2000, depth=depth)).text.index(task.answer) / len(task.text)
        for depth in (0.0, 0.5, 1.0)
    ]
    assert places[0] < 0.05
    assert 0.4 < places[1] < 0.6
    assert places[2] > 0.9


def test_answer_is_recognised_in_any_case() -> None:
    task = reading_task(Words(), 200)
    assert task.answered_by(f"It is {task.answer.upper()}!")
    assert not task.answered_by("I do not know.")


@pytest.mark.parametrize("tokens", [5, 10_000_000])
def test_impossible_length_of_task_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigurationError, match=f"tokens is {tokens}"):
        reading_task(Words(), tokens)


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_impossible_depth_is_refused(depth: float) -> None:
    with pytest.raises(ConfigurationError, match="depth is"):
        reading_task(Words(), 200, depth=depth)
