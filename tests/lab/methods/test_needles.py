"""Needles: where the text is cut, and what a score is made of, on a model that a test decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat_model import write_tiny_chat_model

from kvstrata.contract.budget import Rows
from kvstrata.engines.transformers import LoadedModel, attach, load_model
from kvstrata.lab.methods.contenders import Contender
from kvstrata.lab.methods.needles import Haystack, Needle, needle
from kvstrata.lab.prose import reading_task
from kvstrata.methods.streaming import Streaming

TOKENS = 700  # of a tokenizer that has one for every byte


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_tiny_chat_model(tmp_path_factory.mktemp("model"), layers=2)
    return load_model(path, dtype="float32")


def text(loaded: LoadedModel, ids: list[int]) -> str:
    return str(loaded.tokenizer.decode(ids))


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("template", [True, False])
def test_history_ends_before_the_question(loaded: LoadedModel, depth: float, template: bool) -> None:
    before = loaded.tokenizer.chat_template
    try:
        if not template:
            loaded.tokenizer.chat_template = None
        task = needle(loaded.tokenizer, TOKENS, depth, seed=4)
        whole = reading_task(loaded.tokenizer, TOKENS, depth=depth, seed=4)
    finally:
        loaded.tokenizer.chat_template = before
    assert task.answer == whole.answer
    assert (task.depth, task.tokens) == (depth, TOKENS)
    beginning = len(task.history) + len(task.question) - TOKENS
    assert task.history + task.question[:-beginning] == whole.prompt_ids
    assert task.answer in text(loaded, task.history)
    asked = text(loaded, task.question)
    assert asked.startswith("\n\nAnswer from the text")
    assert whole.question in asked
    assert task.answer not in asked
    subject = whole.question.removeprefix("Who is the ").removesuffix("?")
    assert asked.endswith(f"The {subject} is")
    assert text(loaded, task.answer_ids) == f" {task.answer}"


class Fixed:
    """A model that says one text whatever it is fed: the k-th forward after the history predicts its k-th token."""

    def __init__(self, memory: Any, loaded: LoadedModel, said: list[int], question: int) -> None:
        self.memory, self.said, self.question = memory, said, question
        self.model, self.prefill, self.save = self, memory.prefill, memory.save
        self.device, self.generation_config = loaded.model.device, loaded.model.generation_config
        self.fed: list[list[int]] = []
        self.choices: list[dict[str, Any]] = []

    def restore(self, *args: Any, **choice: Any) -> Any:
        self.fed.append([])
        self.choices.append(choice)
        return self.memory.restore(*args, **choice)

    def __call__(self, *, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        out = self.memory.model(input_ids=input_ids, **kwargs)
        self.fed[-1] += input_ids[0].tolist()
        place = len(self.fed[-1]) - self.question
        out.logits[:] = 0
        out.logits[0, -1, self.said[min(max(place, 0), len(self.said) - 1)]] = 5.0
        return out


def small_task(loaded: LoadedModel, answer: str) -> Needle:
    def ids(words: str) -> list[int]:
        return [int(token) for token in loaded.tokenizer(words, add_special_tokens=False).input_ids]

    return Needle(ids("A long text. " * 20), ids(" Who?"), ids(f" {answer}"), answer, 0.5, 265)


@pytest.mark.parametrize(
    ("said", "reply", "found", "exact"),
    [
        (" Ada Byron.", "Ada Byron", True, True),
        (" Ada Byron!", "Ada Byron!", True, False),
        (" maybe ADA BYRON. Yes", "maybe ADA BYRON", True, False),
        (" Ada Byrne", "Ada Byrne", False, False),
        ("", "", False, False),
    ],
)
def test_scores_of_what_is_said(
    loaded: LoadedModel, tmp_path: Path, said: str, reply: str, found: bool, exact: bool
) -> None:
    task = small_task(loaded, "Ada Byron")
    end = int(loaded.model.generation_config.eos_token_id)
    tokens = [int(token) for token in loaded.tokenizer(said, add_special_tokens=False).input_ids] + [end]
    with attach(loaded, tmp_path) as memory:
        model = Fixed(memory, loaded, tokens, len(task.question))
        score = Haystack(model, loaded.tokenizer, task, "needle").score(None)  # type: ignore[arg-type]
    assert (score.reply, score.found, score.exact, score.chose) == (reply, found, exact, 0.0)
    vocabulary = loaded.model.config.vocab_size
    likely = 5 - torch.tensor([5.0] + [0.0] * (vocabulary - 1)).logsumexp(0).item()
    agreeing = sum(a == b for a, b in zip([*tokens, *[end] * 20], task.answer_ids, strict=False))
    expected = len(task.answer_ids) * likely - 5 * (len(task.answer_ids) - agreeing)
    assert score.log_prob == pytest.approx(expected, abs=1e-3)
    # The question always, the answer forced; and a reply of its own where that went another way.
    forced = [*task.question, *task.answer_ids]
    assert model.fed[0][: len(forced)] == forced
    assert len(model.fed) == (1 if said.startswith(" Ada Byron") else 2)


def test_a_method_chooses_for_question_and_answer(loaded: LoadedModel, tmp_path: Path) -> None:
    task = small_task(loaded, "Ada Byron")
    with attach(loaded, tmp_path) as memory:
        haystack = Haystack(memory, loaded.tokenizer, task, "needle")
        exact = haystack.score(None)
        assert haystack.score(None) == exact
        few = haystack.score(Contender("few", Streaming(), 70, Rows(70)))
        assert (exact.chose, few.chose) == (0.0, 1.0)
        assert few.log_prob != exact.log_prob
        ids = torch.tensor([[*task.history, *task.question, *task.answer_ids]])
        with torch.no_grad():
            logits = memory.model(ids, use_cache=False).logits[0].double()
    places = range(len(task.history) + len(task.question) - 1, ids.shape[1] - 1)
    told = sum(float(torch.log_softmax(logits[place], -1)[ids[0, place + 1]]) for place in places)
    assert exact.log_prob == pytest.approx(told, abs=1e-2)
