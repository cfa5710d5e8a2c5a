"""Beams share what they have in common, and nothing of them is ever sealed, published or saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach, chunk_files
from matrix_runs import generate, model_of, padded, stock_cache, tokens

from kvstrata.errors import BudgetError

BEAMS: dict[str, Any] = {"num_beams": 3, "early_stopping": True, "num_return_sequences": 2}
PROMPTS = [tokens(61, seed=2), tokens(140, seed=3)]
NEW = CHUNK
"""Rows of beams pass a chunk boundary."""


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_only_the_prompt_is_stored_and_saved(tmp_path: Path, family: str) -> None:
    model, (ids, mask) = model_of(family), padded([PROMPTS[1]])
    expected = generate(model, (ids, mask), stock_cache(model), NEW, **BEAMS)
    with attach(model, tmp_path / "store", model_id="m") as memory:
        ours = generate(model, (ids, mask), memory.generate_kwargs(), NEW, **BEAMS)
        assert ours.sequences.tolist() == expected.sequences.tolist()
        request = memory.latest
        assert len(request.rows) == 3
        chunks = [record.identity.token_ids for row in request.rows for record in row.history.chunks]
        assert set(chunks) == {tuple(PROMPTS[1][:CHUNK]), tuple(PROMPTS[1][CHUNK : 2 * CHUNK])}
        assert len(memory.directory) == 2
        for row in range(3):
            assert memory.save("beams", request, row=row).frontier == len(PROMPTS[1])
        assert len(chunk_files(tmp_path / "store")) == 3
    whole = [*PROMPTS[1], *tokens(9, seed=5)]
    with attach(model, tmp_path / "store", model_id="m") as memory:
        restored, receipt = memory.restore("beams")
        assert receipt.restored_tokens == len(PROMPTS[1])
        assert restored.token_ids == PROMPTS[1]
        after = generate(model, padded([whole]), restored.generate_kwargs(), 6).sequences.tolist()
    assert after == generate(model, padded([whole]), stock_cache(model), 6).sequences.tolist()


def test_beams_of_a_batch_under_a_small_budget(tmp_path: Path) -> None:
    """What does not fit is refused with the budget that would do; with that, the stock beams come out."""
    model = model_of("llama")
    expected = generate(model, padded(PROMPTS), stock_cache(model), 12, **BEAMS).sequences.tolist()
    budgets = [200_000]
    while True:
        try:
            with attach(model, tmp_path / "store", budget=budgets[-1], prefill_chunk=CHUNK) as memory:
                ours = generate(model, padded(PROMPTS), memory.generate_kwargs(), 12, **BEAMS).sequences.tolist()
                assert memory.ledger().peak_device_bytes <= memory.budget
                break
        except BudgetError as error:
            budgets.append(error.required_bytes)
    assert ours == expected
    assert len(budgets) > 1
    assert budgets == sorted(set(budgets))


def test_beams_share_sealed_chunks_and_give_back_what_they_drop(tmp_path: Path) -> None:
    model, layers = model_of("llama"), 3
    with attach(model, tmp_path / "store") as memory:
        request = memory.request()
        generate(model, padded([PROMPTS[1]]), request.generate_kwargs(), 5, **BEAMS)
        assert [len(row.history.chunks) for row in request.rows] == [2, 2, 2]
        assert memory.arena.used_slots == layers * (2 + 3)
        request.cache.reorder_cache(torch.tensor([1, 1, 1]))
        assert memory.arena.used_slots == layers * (2 + 3)
        assert len({tuple(row.token_ids) for row in request.rows}) == 1
        request.cache.batch_select_indices(torch.tensor([0]))
        assert memory.arena.used_slots == layers * (2 + 1)
        request.close()
        assert memory.arena.used_slots == 0
        assert len(memory.directory) == 0
