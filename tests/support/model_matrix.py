"""The matrix of model families and modes: every mode is one function that any family must pass, in fp32."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_cases import CHUNK, attach, budget_of, least_budget, require_within_budget
from matrix_runs import (
    CLOSE,
    GREEDY,
    Comparison,
    Run,
    assistant_of,
    generate,
    model_of,
    padded,
    require_same,
    run,
    stock_cache,
    tokens,
)
from transformers import DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from kvstrata.engines.transformers.families import family_of
from kvstrata.engines.transformers.memory import Memory
from kvstrata.errors import BudgetError

__all__ = ["MODES", "Case", "Mode"]

LONG = 330
"""Tokens of a prompt whose segments a least budget cannot hold."""

MARGIN = 1e-4
"""Least difference between the two best logits of a step that decides for a token."""

BEAMS: dict[str, Any] = {"num_beams": 3, "early_stopping": True, "num_return_sequences": 2, "output_scores": True}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 40}


@dataclass(frozen=True)
class Case:
    """One family's tiny model, and a folder for stores."""

    name: str
    folder: Path

    @property
    def model(self) -> Any:
        """The model; every test of the family uses the same object."""
        return model_of(self.name)

    @property
    def has_full_layers(self) -> bool:
        """Whether some layer sees the whole history, so that all of it must be read in each step."""
        return any(rule.window is None for rule in family_of(self.model).layer_rules)

    @property
    def has_windows(self) -> bool:
        """Whether some layer sees a sliding window of the history."""
        return any(rule.window is not None for rule in family_of(self.model).layer_rules)

    def attach(self, **options: Any) -> Memory:
        """The model attached to the case's store."""
        return attach(self.model, self.folder / "store", model_id=self.name, **options)


@dataclass(frozen=True)
class Mode:
    """name: of its column on the page. run: raises where a family does not pass. group: what it is compared by."""

    name: str
    group: str
    run: Callable[[Case], None]


MODES: dict[str, Mode] = {}


def mode(name: str, group: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Enter a function into `MODES`."""

    def enter(run: Callable[[Case], None]) -> Callable[[Case], None]:
        MODES[name] = Mode(name, group, run)
        return run

    return enter


@mode("chunked prefill", "logits")
def chunked_prefill(case: Case) -> None:
    """Every row of a prompt that is cut into steps and is several windows long."""
    ids, comparison = tokens(220), Comparison(case.name)
    with torch.no_grad():
        expected = case.model(torch.tensor([ids]), **stock_cache(case.model)).logits[0]
    with case.attach() as memory:
        ours = case.model(torch.tensor([ids]), past_key_values=memory.request().cache).logits[0]
        assert memory.latest.token_ids == ids
    comparison.add(ids, ours, expected)
    comparison.require_as_good()


@mode("decode", "logits")
def decode(case: Case) -> None:
    """Greedy decoding."""
    _compared(case, _stock_decode(case.name))


@mode("eviction", "logits")
def eviction(case: Case) -> None:
    """The same with the least budget: segments come from files in every step, where layers see the whole history."""
    _evicted(case, _stock_decode(case.name))


@mode("save and restore", "logits")
def restore(case: Case) -> None:
    """Saved in the middle, restored under another attachment with the least budget, and gone on with."""
    ids, comparison = tokens(230), Comparison(case.name)
    cache = DynamicCache(config=case.model.config)
    bounds = [(0, 170), (170, 171), (171, 191), (191, 230)]
    with torch.no_grad():
        expected = [case.model(torch.tensor([ids[a:b]]), past_key_values=cache).logits[0] for a, b in bounds]
    with case.attach() as memory:
        case.model(torch.tensor([ids[:170]]), past_key_values=memory.request().cache)
        assert memory.save("middle").frontier == 170
    with case.attach(budget=least_budget(case.model, 230, case.folder / "probe", model_id=case.name)) as memory:
        request, receipt = memory.restore("middle")
        assert receipt.restored_tokens == 170
        for (start, stop), stock in zip(bounds[1:], expected[1:], strict=True):
            ours = case.model(torch.tensor([ids[start:stop]]), past_key_values=request.cache).logits[0]
            comparison.add(ids[:stop], ours, stock)
        assert request.token_ids == ids
        require_within_budget(memory)
    comparison.require_as_good()


@mode("padded batch", "logits")
def batch(case: Case) -> None:
    """Three uneven prompts, padded on the left."""
    _compared(case, _stock_batch(case.name))


@mode("padded batch, evicted", "logits")
def batch_evicted(case: Case) -> None:
    """The same with a budget below what the three histories take."""
    _evicted(case, _stock_batch(case.name))


@mode("padding between turns", "logits")
def batch_turns(case: Case) -> None:
    """A second turn of a batch, again with prompts of uneven lengths, under a longer mask."""
    model, comparison, first = case.model, Comparison(case.name), _stock_batch(case.name)
    before, width, after = (
        padded(first.prompts),
        first.mask.shape[1] + 1,
        padded([tokens(20, seed=5), tokens(70, seed=6), tokens(33, seed=7)]),
    )
    made = torch.tensor([row[:6] for row in first.made])
    batch = (
        torch.cat([before[0], made, after[0]], dim=1),
        torch.cat([before[1], torch.ones_like(made), after[1]], dim=1),
    )
    with case.attach() as memory:
        request = memory.request()
        assert generate(model, before, request.generate_kwargs(), 6).sequences[:, width:].tolist() == made.tolist()
        ours = run(model, batch, request.generate_kwargs(), 14, start=request.width)
        assert [row.token_ids for row in request.rows] == _fed(ours)
    if case.has_windows:
        # Transformers' windows count padding between turns as tokens: there each sequence alone tells what is right.
        stocks = [run(model, padded([ids]), stock_cache(model), 14) for ids in ours.prompts]
        assert ours.made == [stock.made[0] for stock in stocks]
        for row, (ids, stock) in enumerate(zip(_fed(ours), stocks, strict=True)):
            found = ours.logits(row)
            comparison.add(ids, found, stock.logits(0)[-len(found) :], stock.steps)
    else:
        cache = stock_cache(model)
        generate(model, before, cache, 6)
        comparison.add_runs(ours, run(model, batch, cache, 14, start=width + 5))
    comparison.require_as_good()


@mode("sampling", "ids")
def sampling(case: Case) -> None:
    """With a seed."""
    _same_ids(case, [tokens(120)], 10, seed=7, **SAMPLING)


@mode("several samples", "ids")
def several_samples(case: Case) -> None:
    """Three continuations of one prompt, with a seed."""
    _same_ids(case, [tokens(120)], 8, seed=8, num_return_sequences=3, **SAMPLING)


@mode("beams", "ids")
def beams(case: Case) -> None:
    """Beam search over one prompt."""
    _same_ids(case, [tokens(130)], 8, **BEAMS)


@mode("beams of a padded batch", "ids")
def beams_of_a_batch(case: Case) -> None:
    """Beam search over two uneven prompts."""
    _same_ids(case, _uneven()[:2], 6, **BEAMS)


@mode("prompt look-up", "ids")
def lookup(case: Case) -> None:
    """Drafts out of a prompt that repeats itself."""
    _same_ids(case, [tokens(20) * 7], 16, prompt_lookup_num_tokens=4)


@mode("assisted", "ids")
def assisted(case: Case) -> None:
    """Drafts of a second model that is wrong now and then."""
    _same_ids(case, [tokens(120)], 12, assistant_model=assistant_of(case.name))


@mode("several turns", "ids")
def turns(case: Case) -> None:
    """Three turns on one cache."""
    history, cache = tokens(90), stock_cache(case.model)
    prompts, expected = [], []
    for turn in range(3):
        prompts.append(history)
        expected.append(generate(case.model, padded([history]), cache, 5))
        history = expected[-1].sequences[0].tolist() + tokens(67, seed=turn + 10)
    with case.attach() as memory:
        request = memory.request()
        for prompt, stock in zip(prompts, expected, strict=True):
            require_same(generate(case.model, padded([prompt]), request.generate_kwargs(), 5), stock)
            assert request.token_ids == stock.sequences[0, :-1].tolist()


class _Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class _At(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@mode("streamer", "ids")
def streamer(case: Case) -> None:
    """Tokens come one by one."""
    collected = _Collected()
    expected = generate(case.model, padded([tokens(70)]), stock_cache(case.model), 8)
    with case.attach() as memory:
        ours = generate(case.model, padded([tokens(70)]), memory.generate_kwargs(), 8, streamer=collected)
    require_same(ours, expected)
    assert collected.tokens == expected.sequences[0].tolist()
    assert collected.ended


@mode("stopping criteria", "ids")
def criteria(case: Case) -> None:
    """The caller's own rule ends a batch."""
    _same_ids(case, _uneven(), 20, stopping_criteria=[_At(154)])


@mode("inputs_embeds", "ids")
def embeddings(case: Case) -> None:
    """Embeddings instead of ids: served, but rows without ids have no name to be stored under."""
    embeds = case.model.get_input_embeddings()(torch.tensor([tokens(140)])).detach()
    given: dict[str, Any] = {"inputs_embeds": embeds, "max_new_tokens": 10, **GREEDY}
    expected = case.model.generate(**given, **stock_cache(case.model))
    with case.attach() as memory:
        ours = case.model.generate(**given, **memory.generate_kwargs())
        assert memory.latest.frontier == 149
        assert len(memory.directory) == 0
    require_same(ours, expected)


@mode("rows that end early", "ids")
def early_end(case: Case) -> None:
    """An end token comes in one row of a batch before the others; its history ends there."""
    free, prompts = _stock_batch(case.name).made, _stock_batch(case.name).prompts
    token = ending_token(free)
    lengths = [row.index(token) if token in row else 13 for row in free]
    expected = generate(case.model, padded(prompts), stock_cache(case.model), 14, eos_token_id=token)
    with case.attach() as memory:
        ours = generate(case.model, padded(prompts), memory.generate_kwargs(), 14, eos_token_id=token)
        found = [row.token_ids for row in memory.latest.rows]
    assert ours.sequences.tolist() == expected.sequences.tolist()
    for row, length in enumerate(lengths):
        for mine, theirs in list(zip(ours.logits, expected.logits, strict=True))[: length + 1]:
            torch.testing.assert_close(mine[row], theirs[row], atol=CLOSE, rtol=0)
    assert len(set(lengths)) > 1
    assert found == [[*ids, *row[:length]] for ids, row, length in zip(prompts, free, lengths, strict=True)]


def ending_token(rows: list[list[int]]) -> int:
    """A token that ends one row after two tokens at least, and another row later or not at all."""
    for row in rows:
        for step in range(2, len(row) - 2):
            token = row[step]
            if token not in row[:step] and any(token not in other[: step + 1] for other in rows):
                return token
    raise AssertionError("no token ends one row before another")


@functools.cache
def _stock_decode(name: str) -> Run:
    return _decided(name, lambda seed: [tokens(LONG, seed)], 42)


@functools.cache
def _stock_batch(name: str) -> Run:
    return _decided(name, _uneven, 14)


def _uneven(seed: int = 1) -> list[list[int]]:
    """Prompts of a batch: the longest is three times as long as a sliding window."""
    return [tokens(length, seed + length) for length in (61, 150, 97)]


def _decided(name: str, prompts: Callable[[int], list[list[int]]], new: int) -> Run:
    """A stock run in which no token hangs on the last bits of the logits: a tie says nothing about rows."""
    model = model_of(name)
    runs = (run(model, padded(prompts(seed)), stock_cache(model), new) for seed in itertools.count(1))
    return next(found for found in runs if found.margin > MARGIN)


def _compared(case: Case, expected: Run, **options: Any) -> int:
    """Logits, ids and committed rows of a run through a memory; returns the bytes that came from files."""
    comparison, new = Comparison(case.name), expected.steps
    with case.attach(**options) as memory:
        ours = run(case.model, padded(expected.prompts), memory.generate_kwargs(), new)
        assert [row.token_ids for row in memory.latest.rows] == _fed(ours)
        require_within_budget(memory)
        moved = memory.ledger().traffic["file"].moved_bytes
    comparison.add_runs(ours, expected)
    comparison.require_as_good()
    return moved


def _evicted(case: Case, expected: Run) -> None:
    """The same run with the least budget; what a refusal asks for is given."""
    lengths = [len(ids) for ids in _fed(expected)]
    slots = family_of(case.model).layers * len(lengths) + sum(length // CHUNK for length in lengths)
    budget = budget_of(case.model, slots, prefill=CHUNK)
    while True:
        try:
            moved = _compared(case, expected, budget=budget, prefill_chunk=CHUNK)
            break
        except BudgetError as error:
            budget = error.required_bytes
    assert moved > 0 or not case.has_full_layers


def _fed(found: Run) -> list[list[int]]:
    """What the model has been given of every sequence: all but the last generated token."""
    return [[*ids, *made[:-1]] for ids, made in zip(found.prompts, found.made, strict=True)]


def _same_ids(case: Case, prompts: list[list[int]], new: int, seed: int | None = None, **options: Any) -> None:
    inputs = padded(prompts)
    if seed is not None:
        torch.manual_seed(seed)
    expected = generate(case.model, inputs, stock_cache(case.model), new, **options)
    with case.attach() as memory:
        if seed is not None:
            torch.manual_seed(seed)
        ours = generate(case.model, inputs, memory.generate_kwargs(), new, **options)
    require_same(ours, expected)
    scores = getattr(expected, "sequences_scores", None)
    assert (scores is not None) is ("num_beams" in options)
    if scores is not None:
        torch.testing.assert_close(ours.sequences_scores, scores, atol=CLOSE, rtol=0)
