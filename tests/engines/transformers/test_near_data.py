"""Rows that are attended to in the host arena: also when a copy there goes bad in the middle of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, budget_of, generate
from fixed_choice import FixedChoice
from gate_cases import PROMPT, STEPS, Recorder, choosing, prompt, run
from tiny_models import tiny_model

from kvstrata.contract.budget import Fraction
from kvstrata.contract.method import ComputeSite
from kvstrata.engines.transformers.context import segment_layout

METHOD = FixedChoice(step=5, unit=4)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


class Damage(Recorder):
    """After the first step, every copy in the host arena of a segment that the device does not hold goes bad."""

    damaged = 0

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.steps:
            arena = self.request.memory.host.arena
            for record in self.request.history.chunks:
                for layer, grant in enumerate(record.host.grants):
                    if grant is not None and record.grants[layer] is None:
                        arena.backing.writable(grant.slot)[33] ^= 1
                        self.damaged += 1
        return super().__call__(ids, scores, **kwargs)


def test_a_host_copy_that_goes_bad_is_revoked_and_its_rows_come_from_files(model: Any, tmp_path: Path) -> None:
    with choosing(model, tmp_path / "wide", METHOD, budget=Fraction(0.9)) as memory:
        expected, _, _ = run(memory, prompt())
    layers = model.config.num_hidden_layers
    slots = 2 * layers + 2 * PROMPT // CHUNK
    segment = -(-segment_layout(model, CHUNK).segment_bytes // 4096) * 4096
    limits = {"memory_budget": budget_of(model, slots, prefill=CHUNK), "prefill_chunk": CHUNK}
    host = {"host_budget": segment * layers * (PROMPT // CHUNK + 1), "budget": Fraction(0.9)}
    with choosing(model, tmp_path / "narrow", METHOD, **limits, **host) as memory:
        request = memory.request(site=ComputeSite.NEAR_DATA)
        damage = Damage(request)
        options = {"stopping_criteria": [damage], "min_new_tokens": STEPS}
        output = generate(model, prompt(), STEPS, request.generate_kwargs(), **options)
        assert damage.damaged
        second, last = damage.steps[1].selections[0], damage.steps[-1].selections[0]
        assert second.read_bytes["files"] > 0, "what was damaged is read again"
        assert any(layer.near_bytes for layer in last.layers), "from the copies that this made"
        assert "files" not in last.read_bytes
        assert not request.recomputes
        assert not any(memory.host.arena._holders)
    torch.testing.assert_close(torch.cat(output.logits), expected, rtol=2e-4, atol=2e-4)
