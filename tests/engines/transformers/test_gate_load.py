"""The live gate under load: rows that somebody else displaced, on storage that is slow to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_choice import FixedChoice
from gate_cases import (
    PROMPT,
    STEPS,
    Slow,
    counts,
    exact_logits,
    prompt,
    run,
    slow_memory,
    time_prefills,
    with_tokens,
)
from tiny_models import tiny_model

from kvstrata.contract.method import AnswerClass
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.cost.prepublication import GateThresholds, Outcome
from kvstrata.errors import Reason, RetrievalError, StateError
from kvstrata.placement.gate import GateConfig
from kvstrata.runtime.plain_loop import PlainLoop

LAYERS = 3
NOTHING = GateThresholds(0.05, 0.8)
"""Limits that no selection meets."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def exact(model: Any, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return exact_logits(model, tmp_path_factory.mktemp("exact"), prompt())


def test_rows_that_were_displaced_are_read_again_while_the_deadline_allows(
    model: Any, exact: torch.Tensor, tmp_path: Path
) -> None:
    with slow_memory(model, tmp_path) as slow:
        first, second = slow.displaced(gate=GateConfig(NOTHING, step_ms=10_000))
        second.close()
        logits, _, recorder = run(slow.memory, with_tokens(first, exact), first, tokens=STEPS - 1)
        assert recorder.outcomes[0] == {LayerOutcome.GATE}
        assert recorder.steps[0].moved_bytes > 0
    torch.testing.assert_close(logits, exact[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("done", [1, 2], ids=["whole slices", "a row alone at the end"])
def test_rows_that_take_too_long_to_read_are_computed_again(
    model: Any, exact: torch.Tensor, tmp_path: Path, done: int
) -> None:
    with slow_memory(model, tmp_path) as slow:
        time_prefills(slow)
        gate = GateConfig(NOTHING, step_ms=100)
        first, second = slow.displaced(done, gate=gate)
        second.close()
        logits, _, recorder = run(slow.memory, with_tokens(first, exact), first, tokens=STEPS - done)
        (again,) = first.recomputes
        rows = PROMPT + done - 1
        assert (again.start, again.tokens, again.reason) == (0, rows, Reason.CHEAPER_TO_RECOMPUTE)
        assert slow.memory.ledger().tokens_recomputed == rows
        assert counts(first)[Outcome.RECOMPUTE_EXACT] == 1
        # Page extrema do not shrink by so much: the step builds them anew, over rows that are all there.
        assert recorder.outcomes == [{LayerOutcome.BUILDING}, *[{LayerOutcome.GATE}] * (STEPS - done - 1)]
        assert all(step.contract is AnswerClass.EXACT and not step.moved_bytes for step in recorder.steps)
        assert first.history.context.lineage == "exact"
        assert first.frontier == PROMPT + STEPS - 1
    torch.testing.assert_close(logits, exact[done:], rtol=1e-4, atol=1e-4)


def test_what_was_computed_again_is_published_also_when_it_took_longer(
    model: Any, exact: torch.Tensor, tmp_path: Path
) -> None:
    with slow_memory(model, tmp_path, method=FixedChoice()) as slow:
        time_prefills(slow)
        first, second = slow.displaced(gate=GateConfig(NOTHING, step_ms=100))
        second.close()

        def stall(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            slow.clock.sleep(0.2 if hidden.shape[1] > 1 else 0.0)

        hook = model.model.layers[0].register_forward_pre_hook(stall, with_kwargs=True)
        logits, _, recorder = run(slow.memory, with_tokens(first, exact), first, tokens=STEPS - 1)
        hook.remove()
        assert counts(first) == {Outcome.RECOMPUTE_EXACT: 1, Outcome.FULL_EXACT_FETCH: LAYERS * (STEPS - 2)}
        assert len(first.recomputes) == 1
        assert recorder.outcomes == [{LayerOutcome.GATE}] * (STEPS - 1)
    torch.testing.assert_close(logits, exact[1:], rtol=1e-4, atol=1e-4)


def test_one_of_several_sequences_is_not_computed_again(model: Any, tmp_path: Path) -> None:
    both = torch.cat([prompt(PROMPT // 2), prompt(PROMPT // 2, seed=4)])
    with slow_memory(model, tmp_path) as slow:
        time_prefills(slow)
        _, request, _ = run(slow.memory, both, tokens=1, gate=GateConfig(NOTHING, step_ms=100))
        slow.memory.publisher.wait()
        slow.displace(request).close()
        with pytest.raises(RetrievalError) as caught:
            run(slow.memory, torch.cat([both, both[:, :1]], dim=1), request)
        assert caught.value.reason is Reason.NO_LEGAL_PATH
        assert not request.recomputes
        assert [row.frontier for row in request.rows] == [PROMPT // 2] * 2


def test_rows_without_known_tokens_are_not_computed_again(model: Any, tmp_path: Path) -> None:
    embeds = model.get_input_embeddings()(torch.tensor([[3]])).detach()
    with slow_memory(model, tmp_path) as slow:
        time_prefills(slow)
        request, second = slow.displaced(gate=GateConfig(NOTHING, step_ms=100))
        second.close()
        with torch.no_grad():
            run(slow.memory, torch.tensor([[*prompt()[0].tolist(), 7]]), request, tokens=1)
            model(inputs_embeds=embeds, **request.generate_kwargs())
            assert not request.history.named
            slow.displace(request).close()
            with pytest.raises(RetrievalError) as caught:
                model(inputs_embeds=embeds, **request.generate_kwargs())
        assert caught.value.reason is Reason.NO_LEGAL_PATH
        assert request.frontier == PROMPT + 2
        assert counts(request)[Outcome.REFUSE] == 1


class Relief:
    """A step loop that ends the load when it is asked: it closes the other request, and lets a third one run."""

    def __init__(self, calls_in_vain: int = 0) -> None:
        self.calls: list[float] = []
        self.in_vain = calls_in_vain
        self.seen: list[tuple[int, bool]] = []
        self.slow: Slow
        self.first: Any = None
        self.second: Any = None

    def postpone(self, retry_window_ms: float) -> None:
        self.calls.append(retry_window_ms)
        self.seen.append((self.first.frontier, self.first.in_step))
        if len(self.calls) > self.in_vain:
            self.relieve()

    def relieve(self) -> None:
        self.second.close()
        third, _ = self.slow.memory.restore("first", mode="exact")
        run(self.slow.memory, torch.tensor([[*third.token_ids, 7]]), third, tokens=2)
        third.close()


@pytest.mark.parametrize("in_vain", [0, 1])
def test_a_step_is_postponed_until_the_load_falls(
    model: Any, exact: torch.Tensor, tmp_path: Path, in_vain: int
) -> None:
    loop = Relief(in_vain)
    gate = GateConfig(NOTHING, step_ms=100, retries=2, retry_window_ms=5)
    with slow_memory(model, tmp_path, loop) as slow:
        loop.slow = slow
        loop.first, loop.second = slow.displaced(gate=gate)
        # What the third request reads would take longer than the step has.
        slow.link.latency_s = 0.0
        logits, _, recorder = run(slow.memory, with_tokens(loop.first, exact), loop.first, tokens=STEPS - 1)
        assert loop.calls == [5.0] * (in_vain + 1)
        assert loop.seen == [(PROMPT, False)] * (in_vain + 1), "nothing of the step was published before"
        assert counts(loop.first)[Outcome.POSTPONE] == in_vain + 1
        assert recorder.outcomes == [{LayerOutcome.GATE}] * (STEPS - 1)
        assert loop.first.history.context.lineage == "exact"
    torch.testing.assert_close(logits, exact[1:], rtol=1e-4, atol=1e-4)


def test_a_plain_loop_waits_for_load_that_ends_by_itself(model: Any, exact: torch.Tensor, tmp_path: Path) -> None:
    relief = Relief()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        relief.slow.clock.sleep(seconds)
        relief.relieve()

    with slow_memory(model, tmp_path, PlainLoop(sleep)) as slow:
        relief.slow = slow
        gate = GateConfig(NOTHING, step_ms=100, retries=1, retry_window_ms=8)
        relief.first, relief.second = slow.displaced(gate=gate)
        slow.link.latency_s = 0.0
        logits, _, recorder = run(slow.memory, with_tokens(relief.first, exact), relief.first, tokens=STEPS - 1)
        assert slept == [0.004]
        assert recorder.outcomes == [{LayerOutcome.GATE}] * (STEPS - 1)
    torch.testing.assert_close(logits, exact[1:], rtol=1e-4, atol=1e-4)


def test_a_step_that_was_postponed_keeps_its_deadline(model: Any, exact: torch.Tensor, tmp_path: Path) -> None:
    loop = Relief()
    gate = GateConfig(NOTHING, step_ms=100, retries=5, retry_window_ms=5)
    with slow_memory(model, tmp_path, loop) as slow:
        loop.slow = slow
        loop.first, loop.second = slow.displaced(gate=gate)
        with pytest.raises(RetrievalError) as caught:
            # The third request reads for longer than the step has.
            run(slow.memory, with_tokens(loop.first, exact), loop.first)
        assert caught.value.reason is Reason.NO_LEGAL_PATH
        assert counts(loop.first) == {Outcome.POSTPONE: 1, Outcome.REFUSE: 1}
        logits, _, _ = run(slow.memory, with_tokens(loop.first, exact), loop.first, tokens=STEPS - 1)
    torch.testing.assert_close(logits, exact[1:], rtol=1e-4, atol=1e-4)


def test_a_step_is_postponed_no_more_often_than_the_gate_says(model: Any, exact: torch.Tensor, tmp_path: Path) -> None:
    loop = Relief(calls_in_vain=10)
    with slow_memory(model, tmp_path, loop) as slow:
        gate = GateConfig(NOTHING, step_ms=100, retries=3, retry_window_ms=5)
        loop.first, loop.second = slow.displaced(gate=gate)
        with pytest.raises(RetrievalError) as caught:
            run(slow.memory, with_tokens(loop.first, exact), loop.first)
        assert caught.value.reason is Reason.NO_LEGAL_PATH
        assert len(loop.calls) == 3
        assert counts(loop.first) == {Outcome.POSTPONE: 3, Outcome.REFUSE: 1}
        assert loop.first.frontier == PROMPT


class Closes:
    """A step loop that ends the request which asks, and goes on as if nothing was."""

    request: Any = None

    def postpone(self, retry_window_ms: float) -> None:
        self.request.close()


def test_a_request_that_is_closed_while_it_waits_publishes_nothing(
    model: Any, exact: torch.Tensor, tmp_path: Path
) -> None:
    loop = Closes()
    with slow_memory(model, tmp_path, loop) as slow:
        gate = GateConfig(NOTHING, step_ms=100, retries=1, retry_window_ms=5)
        loop.request, second = slow.displaced(gate=gate)
        second.close()
        with pytest.raises(StateError) as caught:
            run(slow.memory, with_tokens(loop.request, exact), loop.request)
        assert caught.value.reason is Reason.CLOSED
        assert slow.memory.arena.used_slots == 0


def test_whoever_waits_may_be_interrupted(model: Any, exact: torch.Tensor, tmp_path: Path) -> None:
    calls: list[float] = []

    def sleep(seconds: float) -> None:
        calls.append(seconds)
        raise KeyboardInterrupt

    with slow_memory(model, tmp_path, PlainLoop(sleep)) as slow:
        gate = GateConfig(NOTHING, step_ms=100, retries=1, retry_window_ms=5)
        first, second = slow.displaced(gate=gate)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run(slow.memory, with_tokens(first, exact), first)
            assert first.frontier == PROMPT
            # The next step has a deadline and retries of its own.
            slow.clock.sleep(10.0)
        assert len(calls) == 2
        second.close()
        time_prefills(slow)
        logits, _, _ = run(slow.memory, with_tokens(first, exact), first, tokens=STEPS - 1)
        assert counts(first)[Outcome.RECOMPUTE_EXACT] == 1
    torch.testing.assert_close(logits, exact[1:], rtol=1e-4, atol=1e-4)
