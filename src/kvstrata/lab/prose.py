"""English prose and a reading task of any length, without a download.

The text is Python's own language reference, which every CPython carries as `pydoc_data.topics`. It is the same on every
run of one Python release and differs a little between releases.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Protocol

from kvstrata.errors import ConfigurationError, Reason

__all__ = ["ReadingTask", "Tokenizer", "paragraphs", "prose", "reading_task"]

_EMPHASIS = re.compile(r"(?<!\*)\*{1,2}([^\s*][^*]*)\*{1,2}(?!\*)")
_CLOSING_WORDS = 256
_FEWEST_WORDS = 9
_BREAK = "\n\n"
_STOPS = (".", ":")

# Names to copy: what a model of a hundred million parameters can still answer over thousands of tokens.
_FACTS = (
    (
        "The lighthouse keeper of Tarn Island is Magnus Oyelaran.",
        "Who is the lighthouse keeper of Tarn Island?",
        "Magnus Oyelaran",
    ),
    (
        "The head cook of the Larch Inn is Beatrix Holloway.",
        "Who is the head cook of the Larch Inn?",
        "Beatrix Holloway",
    ),
    (
        "The conductor of the Kesselburg night train is Anton Varga.",
        "Who is the conductor of the Kesselburg night train?",
        "Anton Varga",
    ),
    ("The harbour master of Veldmoor is Ottilie Brandt.", "Who is the harbour master of Veldmoor?", "Ottilie Brandt"),
)


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of Transformers answer to it."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        """Something whose `input_ids` are the token ids of `text`."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """The conversation as the model's own prompt text."""


@dataclass(frozen=True)
class ReadingTask:
    """A long document with one planted fact, and a question about that fact.

    prompt_ids: the whole prompt in the model's chat template; exactly the number of tokens asked for.
    text: the same prompt as text.
    """

    prompt_ids: list[int]
    question: str
    answer: str
    text: str

    def answered_by(self, reply: str) -> bool:
        """Whether the reply contains the answer, in any case of letters."""
        return self.answer.casefold() in reply.casefold()


@cache
def paragraphs() -> tuple[str, ...]:
    """The prose of the language reference: whole sentences on one line each paragraph, no code, nothing twice."""
    from pydoc_data.topics import topics

    kept: dict[str, None] = {}
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            text = _EMPHASIS.sub(r"\1", " ".join(block.replace("-\n", "-").split()))
            sentence = text[:1].isalpha() and text.endswith(_STOPS) and "::=" not in text
            if sentence and len(text.split()) >= _FEWEST_WORDS:
                kept.setdefault(text)
    return tuple(kept)


def prose(tokens: int, tokenizer: Tokenizer, *, start: int = 0) -> list[int]:
    """Exactly `tokens` token ids of prose from paragraph `start` on, without special tokens.

    There are about 36,000 words, and as many tokens at least. Errors: ConfigurationError when there is not that much.
    """
    if tokens < 1:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"tokens is {tokens}", "ask for at least one")
    available = paragraphs()
    ids: list[int] = []
    for paragraph in islice(available, start, None):
        ids += _ids(tokenizer, paragraph + "\n\n")
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ConfigurationError(
        Reason.INVALID_ARGUMENT, f"tokens is {tokens}, and there is prose for {len(ids)}", "ask for less"
    )


def reading_task(tokenizer: Tokenizer, tokens: int = 6144, *, depth: float = 0.9, seed: int = 0) -> ReadingTask:
    """A prompt of exactly `tokens` tokens: a document, a fact planted in it, and a question about the fact.

    depth: where the fact lies, 0 (first) to 1 (last); small models lose what lies far back.
    seed: chooses the fact and where the document begins.
    Errors: ConfigurationError when the question and the fact alone need more than `tokens`, or there is not that much
    prose.
    """
    if not 0 <= depth <= 1:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"depth is {depth}", "use a number from 0 to 1")
    source = random.Random(seed)  # noqa: S311 - a choice of text, not a secret
    fact, question, answer = source.choice(_FACTS)
    available = paragraphs()
    first = source.randrange(len(available))
    words = f" {_BREAK} ".join(available[first:] + available[:first]).split(" ")

    def prompt(chosen: list[str]) -> tuple[list[int], str]:
        text = _prompt_text(tokenizer, _planted(chosen, fact, depth), question)
        # A template writes its markers itself; elsewhere the tokenizer adds the begin marker that its model expects.
        return _ids(tokenizer, text, markers=getattr(tokenizer, "chat_template", None) is None), text

    low, high = 0, len(words)
    if len(prompt([])[0]) > tokens or len(prompt(words[: min(2 * tokens, high)])[0]) < tokens:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"tokens is {tokens}",
            f"use {len(prompt([])[0])} to about {len(words)}",
        )
    while high - low > 1:
        middle = (low + high) // 2
        if len(prompt(words[:middle])[0]) <= tokens:
            low = middle
        else:
            high = middle
    chosen = words[:low]
    # Not at the end of a paragraph: there a further word also splits the token of the stop and the empty line.
    while chosen and (chosen[-1] == _BREAK or chosen[-1].endswith(_STOPS)):
        chosen.pop()
    ids, text = prompt(chosen)
    # The next word may be longer than the gap: another closes it, or a letter does where words have many tokens.
    inner = (word for word in words[low:] + words[:low] if word[:1].isalpha() and not word.endswith(_STOPS))
    for word in islice(inner, _CLOSING_WORDS):
        for longer in ([*chosen, word], [*chosen[:-1], "".join(chosen[-1:]) + word[0]]):
            if len(ids) == tokens:
                return ReadingTask(ids, question, answer, text)
            longer_ids, longer_text = prompt(longer)
            if len(ids) < len(longer_ids) <= tokens:
                chosen, ids, text = longer, longer_ids, longer_text
                break
    raise ConfigurationError(
        Reason.INVALID_ARGUMENT, f"tokens is {tokens}: no prompt has exactly so many", "use another"
    )


def _planted(words: list[str], fact: str, depth: float) -> str:
    parts = " ".join(words).split(f" {_BREAK} ")
    place = round(depth * len(parts))
    return _BREAK.join([*parts[:place], fact, *parts[place:]]).strip()


def _prompt_text(tokenizer: Tokenizer, document: str, question: str) -> str:
    content = f"Read this text.\n\n{document}\n\nAnswer from the text in one short sentence. {question}"
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{content}\n"
    conversation = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))


def _ids(tokenizer: Tokenizer, text: str, *, markers: bool = False) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=markers).input_ids]
