"""The seven outcomes of the live gate in real calls of `generate`, provoked by load, deadline and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, budget_of, require_within_budget
from fixed_choice import FixedChoice
from gate_cases import (
    PROMPT,
    QUEST,
    STEPS,
    Ticks,
    calibration_of,
    choosing,
    counts,
    exact_logits,
    prompt,
    run,
    with_tokens,
)
from tiny_models import tiny_model

from kvstrata.contract.budget import Rows
from kvstrata.contract.method import AnswerClass
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.cost.prepublication import GateThresholds, Outcome
from kvstrata.engines.transformers.parts import MemoryParts
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.calibration import Calibration
from kvstrata.methods.quest import Quest
from kvstrata.placement.gate import GateConfig
from kvstrata.store.store import Store

LAYERS = 3
GENEROUS, TIGHT, NOTHING = (GateThresholds(limit, 0.8) for limit in (0.85, 0.7, 0.05))
"""Limits that the budget's bound of the calibration meets, that only the wider budget's meets, and that none meets."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def calibration(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    found = calibration_of(model, tmp_path_factory.mktemp("calibration"))
    bounds = {curve.budget: curve.bounds[0] for curve in found.curves}
    assert 0.05 < bounds["Rows(rows=128)"] < 0.7 < bounds["Rows(rows=64)"] < 0.85, bounds
    return found


@pytest.fixture(scope="module")
def exact(model: Any, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return exact_logits(model, tmp_path_factory.mktemp("exact"), prompt())


def test_what_the_limits_allow_is_accepted(model: Any, calibration: Calibration, tmp_path: Path) -> None:
    with choosing(model, tmp_path) as memory:
        plain, _, _ = run(memory, prompt())
        gate = GateConfig(GENEROUS)
        logits, request, recorder = run(memory, prompt(), gate=gate, calibration=calibration)
        assert recorder.outcomes == [{LayerOutcome.BUILDING}, *[{LayerOutcome.SELECTED}] * (STEPS - 1)]
        assert counts(request) == {Outcome.ACCEPT_APPROXIMATE: LAYERS * (STEPS - 1)}
        assert request.last_step.contract is AnswerClass.APPROXIMATE
        assert torch.equal(logits, plain), "the gate changes nothing of what it accepts"


def test_a_tight_limit_is_met_by_the_wider_budget(model: Any, calibration: Calibration, tmp_path: Path) -> None:
    with choosing(model, tmp_path) as memory:
        wide, _, _ = run(memory, prompt(), budget=Rows(128))
        logits, request, recorder = run(memory, prompt(), gate=GateConfig(TIGHT), calibration=calibration)
        assert recorder.outcomes == [{LayerOutcome.BUILDING}, *[{LayerOutcome.WIDENED}] * (STEPS - 1)]
        steps = LAYERS * (STEPS - 1)
        assert counts(request) == {Outcome.WIDEN: steps, Outcome.ACCEPT_APPROXIMATE: steps}
        assert all(layer.visible <= layer.owners * 128 for layer in request.last_step.selections[0].layers)
        assert torch.equal(logits, wide), "the rows are those of the wider budget"


@pytest.mark.parametrize("known", [True, False], ids=["calibrated", "without an artefact"])
def test_what_no_limit_allows_is_read_in_full(
    model: Any, calibration: Calibration, exact: torch.Tensor, tmp_path: Path, known: bool
) -> None:
    with choosing(model, tmp_path) as memory:
        choice = {"calibration": calibration} if known else {}
        logits, request, recorder = run(memory, prompt(), gate=GateConfig(NOTHING), **choice)
        assert recorder.outcomes == [{LayerOutcome.BUILDING}, *[{LayerOutcome.GATE}] * (STEPS - 1)]
        steps = LAYERS * (STEPS - 1)
        widened = {Outcome.WIDEN: steps} if known else {}
        assert counts(request) == {Outcome.FULL_EXACT_FETCH: steps, **widened}
        assert request.last_step.contract is AnswerClass.EXACT
        assert request.history.context.lineage == "exact"
    assert torch.equal(logits, exact)


def test_a_method_without_an_estimate_is_as_uncertain_as_it_gets(
    model: Any, exact: torch.Tensor, tmp_path: Path
) -> None:
    with choosing(model, tmp_path, FixedChoice()) as memory:
        logits, request, recorder = run(memory, prompt(), gate=GateConfig(GateThresholds(0.99, 0.01)))
        assert recorder.outcomes[1:] == [{LayerOutcome.GATE}] * (STEPS - 1)
        assert counts(request) == {Outcome.FULL_EXACT_FETCH: LAYERS * (STEPS - 1)}
    assert torch.equal(logits, exact)


def test_a_request_that_must_be_exact_accepts_nothing(
    model: Any, calibration: Calibration, exact: torch.Tensor, tmp_path: Path
) -> None:
    gate = GateConfig(GENEROUS, force_exact=True, approximation_allowed=True)
    with choosing(model, tmp_path, gate=gate, calibration=calibration) as memory:
        logits, request, _ = run(memory, prompt())
        assert counts(request) == {Outcome.FULL_EXACT_FETCH: LAYERS * (STEPS - 1)}
    assert torch.equal(logits, exact)


@pytest.mark.parametrize("room", [0, 3, 8])
def test_reads_ahead_give_way_to_the_exact_path(model: Any, exact: torch.Tensor, tmp_path: Path, room: int) -> None:
    slots = 2 * LAYERS + PROMPT // CHUNK + room
    limits = {"memory_budget": budget_of(model, slots, prefill=CHUNK), "prefill_chunk": CHUNK}
    with choosing(model, tmp_path, FixedChoice(ahead=True, unit=2), gate=GateConfig(NOTHING), **limits) as memory:
        logits, _, recorder = run(memory, prompt())
        assert recorder.outcomes[1:] == [{LayerOutcome.GATE}] * (STEPS - 1)
        assert all(step.moved_bytes for step in recorder.steps)
        require_within_budget(memory)
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("room", [0, 3, 8])
def test_reads_ahead_are_made_as_far_as_there_is_room(model: Any, tmp_path: Path, room: int) -> None:
    slots = 2 * LAYERS + PROMPT // CHUNK + room
    limits = {"memory_budget": budget_of(model, slots, prefill=CHUNK), "prefill_chunk": CHUNK}
    method = FixedChoice(ahead=True, unit=2)
    with choosing(model, tmp_path / "wide", method) as memory:
        expected, _, _ = run(memory, prompt())
    with choosing(model, tmp_path / "narrow", method, **limits) as memory:
        logits, _, recorder = run(memory, prompt())
        assert recorder.outcomes[1:] == [{LayerOutcome.SELECTED}] * (STEPS - 1)
        require_within_budget(memory)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


BUSY = 1e-3
"""A clock that moves by so much whenever it is read: a machine on which each call takes a millisecond."""


def test_a_late_answer_is_degraded_where_that_is_allowed(model: Any, calibration: Calibration, tmp_path: Path) -> None:
    gate = GateConfig(NOTHING, step_ms=0.5, approximation_allowed=True)
    parts = MemoryParts(clock=Ticks(BUSY))
    with choosing(model, tmp_path, parts=parts) as memory:
        wide, _, _ = run(memory, prompt(), budget=Rows(128))
        logits, request, recorder = run(memory, prompt(), gate=gate, calibration=calibration)
        assert recorder.outcomes[1:] == [{LayerOutcome.DEGRADED}] * (STEPS - 1)
        assert counts(request)[Outcome.DECLARED_DEGRADATION] == LAYERS * (STEPS - 1)
        assert all(step.contract is AnswerClass.APPROXIMATE for step in recorder.steps[1:])
        assert request.history.context.lineage.startswith(f"{request.policy.lineage}/")
        assert torch.equal(logits, wide), "what is degraded is the wider selection, as far as there was one"


def test_a_refused_step_leaves_nothing_and_the_next_one_works(
    model: Any, calibration: Calibration, exact: torch.Tensor, tmp_path: Path
) -> None:
    clock = Ticks(BUSY)
    gate = GateConfig(NOTHING, step_ms=0.5)
    with choosing(model, tmp_path, parts=MemoryParts(clock=clock)) as memory:
        clock.tick = 0.0
        _, request, _ = run(memory, prompt(), tokens=2, gate=gate, calibration=calibration)
        ids = with_tokens(request, exact)
        clock.tick = BUSY
        before = (request.frontier, request.token_ids, request.last_step, memory.arena.used_slots)
        for _ in range(2):
            with pytest.raises(RetrievalError) as caught:
                run(memory, ids, request)
            assert caught.value.reason is Reason.NO_LEGAL_PATH
            assert (request.frontier, request.token_ids, request.last_step, memory.arena.used_slots) == before
            assert request.history.context.lineage == "exact"
        assert counts(request)[Outcome.REFUSE] == 2
        clock.tick = 0.0
        logits, _, recorder = run(memory, ids, request, tokens=STEPS - 2)
        assert recorder.outcomes == [{LayerOutcome.GATE}] * (STEPS - 2)
        assert torch.equal(logits, exact[2:])


def test_indexes_are_as_if_the_refused_step_had_never_been(
    model: Any, calibration: Calibration, tmp_path: Path
) -> None:
    clock = Ticks(BUSY)
    gate = GateConfig(GENEROUS, step_ms=0.5, force_exact=True)
    with choosing(model, tmp_path, parts=MemoryParts(clock=clock)) as memory:
        plain, _, _ = run(memory, prompt())
        _, request, _ = run(memory, prompt(), tokens=1, gate=gate, calibration=calibration)
        ids = torch.cat([prompt(), plain[0].argmax().view(1, 1)], dim=1)
        wrong = torch.cat([prompt(), torch.tensor([[3]])], dim=1)
        with pytest.raises(RetrievalError):
            run(memory, wrong, request)
        request.row.frame._gate.gate.config = GateConfig(GENEROUS)
        logits, _, recorder = run(memory, ids, request, tokens=STEPS - 1)
        assert recorder.outcomes == [{LayerOutcome.SELECTED}] * (STEPS - 1)
        assert torch.equal(logits, plain[1:])


def test_each_sequence_of_a_batch_is_decided_for_itself(
    model: Any, calibration: Calibration, exact: torch.Tensor, tmp_path: Path
) -> None:
    with choosing(model, tmp_path, gate=GateConfig(NOTHING), calibration=calibration) as memory:
        both = torch.cat([prompt(), prompt(seed=4)])
        logits, request, _ = run(memory, both)
        assert counts(request)[Outcome.FULL_EXACT_FETCH] == 2 * LAYERS * (STEPS - 1)
        assert len(request.last_step.selections) == 2
    torch.testing.assert_close(logits.view(STEPS, 2, -1)[:, 0], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model_id": "another"}, Reason.MODEL_MISMATCH),
        ({"method": Quest(page_size=8, dense_layers=0)}, Reason.METHOD_MISMATCH),
        ({"adapters": ["one@1"]}, Reason.ADAPTER_MISMATCH),
        ({"rope_theta": 50_000.0}, Reason.ROPE_CONFIG_MISMATCH),
        ({"head_dim": 8}, Reason.CACHE_ABI_MISMATCH),
    ],
)
def test_a_foreign_calibration_is_refused_by_name(
    model: Any, calibration: Calibration, tmp_path: Path, other: dict[str, Any], reason: Reason
) -> None:
    options = dict(other)
    method = options.pop("method", QUEST)
    if "rope_theta" in options:
        rope = {"rope_type": "default", "rope_theta": options.pop("rope_theta")}
        model = tiny_model("llama", num_hidden_layers=LAYERS, rope_parameters=rope)
    if "head_dim" in options:
        model = tiny_model("llama", num_hidden_layers=LAYERS, head_dim=options.pop("head_dim"))
    with pytest.raises(RetrievalError) as caught:
        choosing(model, tmp_path, method, gate=GateConfig(), calibration=calibration, **options)
    assert caught.value.reason is reason
    assert caught.value.field.startswith("calibration.")
    with Store(tmp_path) as store:
        store.collect(set())  # which nobody may do while somebody else has the store open
    with choosing(model, tmp_path, method, **options) as memory:
        with pytest.raises(RetrievalError) as caught:
            memory.request(gate=GateConfig(), calibration=calibration)
        assert caught.value.reason is reason
        run(memory, prompt(), tokens=1)


def test_a_calibration_survives_its_file(model: Any, calibration: Calibration, tmp_path: Path) -> None:
    import json

    again = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    assert again == calibration
    with choosing(model, tmp_path) as memory:
        _, request, _ = run(memory, prompt(), gate=GateConfig(GENEROUS), calibration=again)
        assert counts(request) == {Outcome.ACCEPT_APPROXIMATE: LAYERS * (STEPS - 1)}
