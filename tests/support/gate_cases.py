"""Requests under a live gate: a clock that only moves when it is read or slept on, a tier that is slow to read, and
receipts of every step of a `generate`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_cases import CHUNK, attach, budget_of, generate

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.receipts import StepReceipt
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.cost.prepublication import Outcome
from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.parts import MemoryParts
from kvstrata.methods.calibrating import calibrate
from kvstrata.methods.calibration import Calibration
from kvstrata.methods.interface import Method
from kvstrata.methods.quest import Quest
from kvstrata.placement.live_shadow import LiveShadow
from kvstrata.store.store import Store
from kvstrata.tiers.files import FileTier, WriteReceipt
from kvstrata.tiers.throttled import Link, ThrottledTier

QUEST = Quest(page_size=4, dense_layers=0)
KEEP = Persistent(sinks=2, recent=9)
BUDGET, WIDER = Rows(64), Rows(128)
PROMPT = 8 * CHUNK
STEPS = 5


def prompt(tokens: int = PROMPT, seed: int = 1) -> torch.Tensor:
    """Token ids [1, tokens]."""
    return torch.randint(1, 190, (1, tokens), generator=torch.Generator().manual_seed(seed))


class Ticks:
    """A clock in seconds: `tick` later whenever somebody looks, and later by what somebody sleeps."""

    def __init__(self, tick: float = 1e-6) -> None:
        self.tick = tick
        self._now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            self._now += self.tick
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


class SlowToRead(ThrottledTier):
    """Reads pass the link; what is written does not wait for it."""

    def write(
        self, identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]
    ) -> WriteReceipt:
        return self.tier.write(identity, layout, segments)

    def has(self, chunk: bytes) -> bool:
        return self.tier.has(chunk)


class Recorder:
    """A stopping criterion that stops nothing: notes the receipt of every step."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.steps: list[StepReceipt] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.steps.append(self.request.last_step)
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    @property
    def outcomes(self) -> list[set[LayerOutcome]]:
        """Of the layers, step by step."""
        return [{layer.outcome for layer in step.selections[0].layers} for step in self.steps]


def choosing(model: Any, store: Any, method: Method[Any] = QUEST, **kwargs: Any) -> Memory:
    given: dict[str, Any] = {"budget": BUDGET, "persistent": KEEP, "min_history": 8, "model_id": "tiny"} | kwargs
    return attach(model, store, method=method, mode="approximate", **given)


def run(
    memory: Memory, ids: torch.Tensor, request: Any = None, tokens: int = STEPS, **choice: Any
) -> tuple[torch.Tensor, Any, Recorder]:
    """Logits [tokens, vocabulary] of a real `generate`, the request, and what was noted of every step."""
    request = request or memory.request(**choice)
    recorder = Recorder(request)
    options = {"stopping_criteria": [recorder], "min_new_tokens": tokens}
    output = generate(memory.model, ids, tokens, request.generate_kwargs(), **options)
    return torch.cat(output.logits), request, recorder


def exact_logits(model: Any, path: Path, ids: torch.Tensor, tokens: int = STEPS) -> torch.Tensor:
    with attach(model, path, model_id="tiny") as memory:
        return run(memory, ids, tokens=tokens)[0]


def calibration_of(
    model: Any, path: Path, method: Method[Any] = QUEST, tokens: int = 20, confidence: float = 0.8
) -> Calibration:
    """From a shadow over real runs under the budget and the wider one, of the prompt that is asked for later."""
    shadow = LiveShadow(every=1)
    with choosing(model, path, method) as memory:
        for budget in (BUDGET, WIDER):
            _, request, _ = run(memory, prompt(), tokens=tokens, shadow=shadow, budget=budget)
            request.close()
        return calibrate(method, memory.context, shadow.samples, confidence=confidence, bins=1)


class Slow:
    """A memory over a store that is slow to read, with room for one conversation of `PROMPT` tokens and little more.

    Two conversations are saved in it: "first" of `prompt()`, and "second" of other tokens.
    """

    def __init__(self, memory: Memory, clock: Ticks, link: Link) -> None:
        self.memory = memory
        self.clock = clock
        self.link = link

    def displaced(self, tokens: int = 1, **choice: Any) -> tuple[Any, Any]:
        """A request for "first" that has taken `tokens` steps of one row, and one for "second" that has taken its
        memory meanwhile."""
        first, _ = self.memory.restore("first", prompt()[0].tolist(), **choice)
        run(self.memory, prompt(), first, tokens=tokens)
        return first, self.displace(first)

    def displace(self, request: Any) -> Any:
        """A request for "second" that has taken the memory of `request`."""
        second, _ = self.memory.restore("second", mode="exact")
        run(self.memory, torch.tensor([[*second.token_ids, 5]]), second, tokens=1)
        chunks = [record for row in request.rows for record in row.history.chunks]
        assert all(record.resident == 0 for record in chunks), "the second one needed all of the memory"
        return second


@contextmanager
def slow_memory(model: Any, path: Path, loop: Any = None, method: Method[Any] = QUEST, **kwargs: Any) -> Iterator[Slow]:
    with attach(model, path, model_id="tiny") as memory:
        for name, seed in (("first", 1), ("second", 2)):
            request = memory.prefill(prompt(seed=seed)[0].tolist())
            memory.save(name, request)
            request.close()
    clock = Ticks()
    link = Link(1e9, latency_s=0.02, clock=clock, sleep=clock.sleep)

    def wrap(tier: FileTier) -> SlowToRead:
        return SlowToRead(tier, link)

    layers = model.config.num_hidden_layers
    slots = layers * (PROMPT // CHUNK + 1) + 6
    parts = MemoryParts(clock=clock, loop=loop)
    with Store(path, wrap_tier=wrap) as store:
        options = {"memory_budget": budget_of(model, slots), "parts": parts} | kwargs
        with choosing(model, store, method, **options) as memory:
            yield Slow(memory, clock, link)


def counts(request: Any) -> dict[Outcome, int]:
    return dict(request.memory.selections.gate(request.policy).counts)


def with_tokens(request: Any, exact: torch.Tensor) -> torch.Tensor:
    """The prompt of a displaced request, and the tokens that its steps yielded."""
    steps = request.frontier - PROMPT + 1
    return torch.cat([prompt(), exact[:steps].argmax(-1).unsqueeze(0)], dim=1)


def time_prefills(slow: Slow) -> None:
    """Other people's prompts: the engine then knows what computing rows costs."""
    timed = slow.memory.prefill(prompt(seed=3)[0].tolist(), slow.memory.request(mode="exact"))
    assert slow.memory.log.prefills.observations >= 3
    timed.close()
