"""A needle in a haystack: a fact in a long text, asked for after the text was stored.

The history is read without the question, as a store would have it. Question and answer are then fed token by token, so
that a method chooses rows for each of them. Families of such tasks: Kamradt 2023 and RULER (Hsieh et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvstrata.engines.transformers import Memory, Request
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.lab.methods.contenders import PERSISTENT, Contender
from kvstrata.lab.methods.divergence import chosen_share
from kvstrata.lab.prose import Tokenizer, reading_task

__all__ = ["Haystack", "Needle", "NeedleScore", "needle"]

_ASKED = "Who is "
_QUESTION_STARTS = "\n\nAnswer from the text"
_REPLY_TOKENS = 24
_MIN_HISTORY = 1024


@dataclass(frozen=True)
class Needle:
    """Token ids of one task. history: up to the question, fact included. question: the rest of the prompt, and the
    beginning of the answer's sentence. answer_ids: `answer` after that beginning. depth: of the fact, 0 to 1. tokens:
    of the prompt, without that beginning.
    """

    history: list[int]
    question: list[int]
    answer_ids: list[int]
    answer: str
    depth: float
    tokens: int


@dataclass(frozen=True)
class NeedleScore:
    """log_prob: of the whole answer, teacher-forced, in nats. reply: what greedy decoding says, to the end of the
    sentence. found: whether the answer is in it, in any case of letters. exact: whether it is the answer and nothing
    else. chose: the share of layers that left rows out in the last step."""

    log_prob: float
    reply: str
    found: bool
    exact: bool
    chose: float


def needle(tokenizer: Tokenizer, tokens: int, depth: float, *, seed: int = 0) -> Needle:
    """A prompt of `tokens` tokens with a fact at `depth`, and the first words of the answer beyond that.

    seed: chooses the fact and where the text begins. Errors: as `reading_task`.
    """
    task = reading_task(tokenizer, tokens, depth=depth, seed=seed)
    before = _ids(tokenizer, task.text[: task.text.rindex(_QUESTION_STARTS)])
    # A model without a template has a marker in front that the text does not show.
    shift = 0 if task.prompt_ids[: len(before) - 1] == before[:-1] else 1
    agree = (i for i, (a, b) in enumerate(zip(task.prompt_ids[shift:], before, strict=False)) if a != b)
    cut = shift + next(agree, len(before))
    subject = task.question.removeprefix(_ASKED).rstrip("?")
    lead = _ids(tokenizer, f"{subject[:1].upper()}{subject[1:]} is")
    answer = _ids(tokenizer, f" {task.answer}")
    return Needle(task.prompt_ids[:cut], task.prompt_ids[cut:] + lead, answer, task.answer, depth, tokens)


class Haystack:
    """One needle's history in `memory`, an exact attachment: read once, and given back to every method that can rebuild
    its index. Blocks while the model reads. progress: called with (tokens done, tokens in all)."""

    def __init__(
        self,
        memory: Memory,
        tokenizer: Any,
        task: Needle,
        name: str,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not task.history or not task.question or not task.answer_ids:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, "a needle needs a history, a question and an answer")
        self.memory, self.task = memory, task
        self._tokenizer, self._name = tokenizer, name
        self._prompt = [*task.history, task.question[0]]
        request = memory.prefill(self._prompt, progress=progress)
        try:
            memory.save(name, request)
        finally:
            request.close()

    def score(self, contender: Contender | None) -> NeedleScore:
        """How `contender` answers; `None` for exact attention. Errors: as `Memory.request`."""
        task, request = self.task, self._begin(contender)
        try:
            logits = self._ask(request)
            log_prob, forced = 0.0, True
            for token in task.answer_ids:
                log_prob += float(torch.log_softmax(logits.double(), -1)[token])
                forced = forced and int(logits.argmax()) == token
                logits = self._feed(request, [token])
            chose = chosen_share(request)
            if forced:
                # Greedy decoding has come the same way.
                reply = [*task.answer_ids, *self._greedy(request, logits, _REPLY_TOKENS - len(task.answer_ids))]
        finally:
            request.close()
        if not forced:
            request = self._begin(contender)
            try:
                reply = self._greedy(request, self._ask(request), _REPLY_TOKENS)
            finally:
                request.close()
        text = _sentence(str(self._tokenizer.decode(reply, skip_special_tokens=True)))
        found = task.answer.casefold() in text.casefold()
        return NeedleScore(log_prob, text, found, text == task.answer, chose)

    def _begin(self, contender: Contender | None) -> Request:
        if contender is None:
            return self.memory.restore(self._name, self._prompt)[0]
        choice: dict[str, Any] = {
            "mode": "approximate",
            "method": contender.method,
            "budget": contender.budget,
            "persistent": PERSISTENT,
            "min_history": min(_MIN_HISTORY, len(self.task.history)),
        }
        if contender.method.contract.rebuilds:
            return self.memory.restore(self._name, self._prompt, **choice)[0]
        return self.memory.prefill(self._prompt, self.memory.request(**choice))

    def _ask(self, request: Request) -> Tensor:
        """Logits after the question: at once where nothing is chosen, else token by token, so that each has rows chosen
        for it."""
        question = self.task.question
        if request.policy is None:
            return self._feed(request, question)
        return [self._feed(request, [token]) for token in question][-1]

    def _feed(self, request: Request, tokens: Sequence[int]) -> Tensor:
        """Logits [vocabulary] after the last of `tokens`, fed in one step."""
        row = torch.tensor([list(tokens)], device=self.memory.model.device)
        with torch.inference_mode():
            out = self.memory.model(input_ids=row, **request.generate_kwargs(), logits_to_keep=1)
        logits: Tensor = out.logits[0, -1].cpu()
        return logits

    def _greedy(self, request: Request, logits: Tensor, most: int) -> list[int]:
        ends = self.memory.model.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        reply: list[int] = []
        while len(reply) < most:
            token = int(logits.argmax())
            if token in stops:
                break
            reply.append(token)
            if len(reply) < most:
                logits = self._feed(request, [token])
        return reply


def _sentence(text: str) -> str:
    """The first sentence, without its stop."""
    return text.strip().partition("\n")[0].partition(". ")[0].removesuffix(".").strip()


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False).input_ids]
