"""With a cost gate nothing that a request needs is lost, whatever is declined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach, budget_of, chunk_files, generate, logits, prompt

from kvstrata.cost.service_rates import Direction, ServiceObservation
from kvstrata.errors import Reason
from kvstrata.store import Store
from kvstrata.store.cost_gate import CostGateConfig

LAYERS = 3
LENGTH = 8 * CHUNK + 10
NEW = 5
CONFIG = CostGateConfig(least_observations=4, probe_every=0)


def slow(store: Store) -> None:
    """As though the disk needed a second for every 100 bytes."""
    for count in range(1, 65):
        for direction in Direction:
            store.rates.record(ServiceObservation("files", direction, 1000 * count, 10.0 * count))


@pytest.mark.parametrize("narrow", [False, True])
def test_what_is_declined_is_written_when_memory_or_a_session_needs_it(
    tiny_llama: Callable[..., Any], tmp_path: Path, narrow: bool
) -> None:
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    with attach(model, tmp_path / "plain", prefill_chunk=CHUNK) as memory:
        expected = logits(generate(model, ids, NEW, memory.generate_kwargs()))
    budget = budget_of(model, 2 * LAYERS + 8, prefill=CHUNK) if narrow else None
    root = tmp_path / "store"
    with (
        Store(root) as store,
        attach(model, store, budget=budget, prefill_chunk=CHUNK, cost_gate=CONFIG) as memory,
    ):
        slow(store)
        ours = logits(generate(model, ids, NEW, memory.generate_kwargs()))
        assert torch.equal(ours, expected)
        assert memory.gating is not None
        assert memory.gating.declined_bytes > 0
        assert memory.gating.latest is not None
        assert memory.gating.latest.reason is Reason.CHEAPER_TO_RECOMPUTE
        assert narrow or len(chunk_files(root)) < 8
        assert memory.save("talk").chunks == 9
        assert len(chunk_files(root)) == 9


def test_a_session_that_is_cheaper_to_compute_is_not_read(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    with Store(tmp_path / "store") as store:
        with attach(model, store, prefill_chunk=CHUNK) as memory:
            expected = logits(generate(model, ids, NEW, memory.generate_kwargs()))
            memory.save("talk")
        with attach(model, store, prefill_chunk=CHUNK, cost_gate=CONFIG) as memory:
            _, receipt = memory.restore("talk", ids[0].tolist())
            assert receipt.reason is None, "nothing is measured yet"
            memory.prefill(prompt(LENGTH, seed=2)[0].tolist())
            slow(store)
            request, receipt = memory.restore("talk", ids[0].tolist())
            assert (receipt.reason, receipt.restored_tokens) == (Reason.CHEAPER_TO_RECOMPUTE, 0)
            assert "computed again" in receipt.detail
            assert request.recomputes[0].reason is Reason.CHEAPER_TO_RECOMPUTE
            ours = logits(generate(model, ids, NEW, request.generate_kwargs()))
    assert torch.equal(ours, expected)
