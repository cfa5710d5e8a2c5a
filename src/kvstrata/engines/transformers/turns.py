"""A conversation as token ids that only ever grow, so that rows of earlier turns stay valid.

A chat template is asked for text, but earlier turns are never tokenised again: an answer's own tokens may differ from
those of its text. What a turn adds is the difference between the template's text with and without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.errors import Reason, UnsupportedError

__all__ = ["Turns"]

_ASKED, _ANSWERED = "question", "answer"


class Turns:
    """Builds prompts for a tokenizer; without a chat template, of lines that begin with `User:` and `Assistant:`.

    Errors: `UnsupportedError` for a template that writes earlier turns anew when a turn is added.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        opening = self._render([("user", _ASKED)], ask=True)
        closed = self._render([("user", _ASKED), ("assistant", _ANSWERED)], ask=False)
        if not closed.startswith(opening + _ANSWERED):
            raise _rewrites()
        self._closed = closed
        self._closing = closed[len(opening) + len(_ANSWERED) :]

    def prompt(self, text: str) -> list[int]:
        """Ids of a conversation that begins with `text`; without a template, with the begin marker of the tokenizer."""
        begin = getattr(self._tokenizer, "chat_template", None) is None
        return self._ids(self._render([("user", text)], ask=True), begin=begin)

    def next_prompt(self, history: Sequence[int], text: str) -> list[int]:
        """`history`, which `closed` returned, and the ids that the user's `text` adds."""
        whole = self._render([("user", _ASKED), ("assistant", _ANSWERED), ("user", text)], ask=True)
        if not whole.startswith(self._closed):
            raise _rewrites()
        return [*history, *self._ids(whole[len(self._closed) :])]

    def closed(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """Ids of `prompt`, `answer` and what the template writes after an answer; an end marker comes once."""
        ending = self._ids(self._closing)
        if answer and ending and answer[-1] == ending[0]:
            ending = ending[1:]
        return [*prompt, *answer, *ending]

    def is_closed(self, history: Sequence[int]) -> bool:
        """Whether `history` ends with what the template writes after an answer."""
        ending = self._ids(self._closing)
        return list(history[len(history) - len(ending) :]) == ending

    def _render(self, turns: Sequence[tuple[str, str]], *, ask: bool) -> str:
        if getattr(self._tokenizer, "chat_template", None) is None:
            lines = "".join(f"{role.capitalize()}: {content}\n" for role, content in turns)
            return f"{lines}Assistant: " if ask else lines
        conversation = [{"role": role, "content": content} for role, content in turns]
        return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=ask))

    def _ids(self, text: str, *, begin: bool = False) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=begin).input_ids]


def _rewrites() -> UnsupportedError:
    return UnsupportedError(
        Reason.OPERATION_UNSUPPORTED,
        "the model's chat template writes earlier turns anew when a turn is added",
        "use `kvstrata generate`, which takes each prompt as a whole",
    )
