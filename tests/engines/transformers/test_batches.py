"""What a batch leaves behind: each row's history is its own, and can be shared, saved, restored and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach
from matrix_runs import generate, model_of, padded, stock_cache, tokens
from model_matrix import ending_token

from kvstrata.errors import Reason, UnsupportedError

NEW = 8
PROMPTS = [tokens(61, seed=2), tokens(150, seed=3), tokens(97, seed=4)]
FAMILIES = ("llama", "gemma3", "mistral")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


def alone(model: Any, ids: list[int], new: int = NEW) -> list[int]:
    """What the stock cache generates after `ids`."""
    return generate(model, padded([ids]), stock_cache(model), new).sequences[0, len(ids) :].tolist()


def test_each_row_is_saved_restored_and_continued_by_itself(model: Any, tmp_path: Path) -> None:
    with attach(model, tmp_path / "store", model_id="m") as memory:
        out = generate(model, padded(PROMPTS), memory.generate_kwargs(), NEW)
        request = memory.latest
        made = out.sequences[:, -NEW:].tolist()
        for row, ids in enumerate(PROMPTS):
            assert memory.save(f"talk {row}", request, row=row).frontier == len(ids) + NEW - 1
    for row, ids in enumerate(PROMPTS):
        with attach(model, tmp_path / "store", model_id="m") as memory:
            whole = [*ids, *made[row], *tokens(30, seed=9)]
            request, receipt = memory.restore(f"talk {row}", whole)
            assert receipt.restored_tokens == len(ids) + NEW - 1
            ours = generate(model, padded([whole]), request.generate_kwargs(), NEW)
        assert ours.sequences[0, -NEW:].tolist() == alone(model, whole)


def test_padded_and_unpadded_rows_share_chunks(model: Any, tmp_path: Path) -> None:
    with attach(model, tmp_path / "store", model_id="m") as memory:
        batch, single = memory.request(), memory.request()
        generate(model, padded(PROMPTS), batch.generate_kwargs(), 1)
        generate(model, padded([PROMPTS[2]]), single.generate_kwargs(), 1)
        (chunk,) = single.history.chunks
        assert batch.rows[2].history.chunks == [chunk]
        assert chunk.users == 2
        assert chunk.identity.token_ids == tuple(PROMPTS[2][:CHUNK])


def test_rows_that_begin_alike_share_chunks(tmp_path: Path) -> None:
    model, common = model_of("llama"), tokens(2 * CHUNK, seed=5)
    prompts = [[*common, *tokens(10, seed=6)], [*common, *tokens(33, seed=7)]]
    with attach(model, tmp_path / "store") as memory:
        out = generate(model, padded(prompts), memory.generate_kwargs(), NEW)
        first, second = (row.history.chunks for row in memory.latest.rows)
        assert first == second
        assert [chunk.users for chunk in first] == [2, 2]
    for row, ids in enumerate(prompts):
        assert out.sequences[row, -NEW:].tolist() == alone(model, ids)


def test_an_ended_row_keeps_neither_its_end_nor_what_follows(model: Any, tmp_path: Path) -> None:
    """The next turn goes on from there, with a mask that hides the end and what follows; with another it is refused."""
    free = [alone(model, ids, 14) for ids in PROMPTS]
    end = ending_token(free)
    kept = [
        [*ids, *(made[: made.index(end)] if end in made else made)] for ids, made in zip(PROMPTS, free, strict=True)
    ]
    second = tokens(20, seed=8)
    expected = [alone(model, [*before, *second]) for before in kept]
    (ids, mask), steps = padded(PROMPTS), max(len(row) - len(ids) for row, ids in zip(kept, PROMPTS, strict=True))
    shown = torch.tensor(
        [[column < len(row) - len(p) for column in range(steps)] for row, p in zip(kept, PROMPTS, strict=True)]
    )
    with attach(model, tmp_path / "store", model_id="m") as memory:
        request = memory.request()
        out = generate(model, (ids, mask), request.generate_kwargs(), steps, eos_token_id=end)
        found = [row.token_ids for row in request.rows]
        assert found == [row[: len(p) + steps - 1] for row, p in zip(kept, PROMPTS, strict=True)]
        whole = torch.cat([out.sequences, torch.tensor([second] * 3)], dim=1)
        showing, hiding = (
            torch.cat([mask, part, torch.ones(3, 20, dtype=torch.long)], dim=1)
            for part in (torch.ones_like(shown), shown)
        )
        with pytest.raises(UnsupportedError, match="after its end") as refusal:
            generate(model, (whole, showing), request.generate_kwargs(), NEW)
        assert refusal.value.reason is Reason.POSITIONS_UNSUPPORTED
        assert [row.token_ids for row in request.rows] == found
        ours = generate(model, (whole, hiding), request.generate_kwargs(), NEW)
    assert ours.sequences[:, -NEW:].tolist() == expected


def test_repeating_and_selecting_rows_of_a_restored_request(model: Any, tmp_path: Path) -> None:
    ids = PROMPTS[1]
    first = [[*ids, *tokens(20, seed=seed)] for seed in (6, 7, 8)]
    expected = [alone(model, prompt) for prompt in first]
    second = [[*first[row], *expected[row], *tokens(5, seed=row)] for row in (2, 0)]
    with attach(model, tmp_path / "store", model_id="m") as memory:
        memory.save("talk", memory.prefill(ids))
        request, _ = memory.restore("talk", ids)
        request.cache.batch_repeat_interleave(3)
        assert [row.token_ids for row in request.rows] == [ids[:-1]] * 3
        ours = generate(model, padded(first), request.generate_kwargs(), NEW)
        assert ours.sequences[:, -NEW:].tolist() == expected
        request.cache.batch_select_indices(torch.tensor([2, 0]))
        assert [row.token_ids for row in request.rows] == [[*first[i], *expected[i][:-1]] for i in (2, 0)]
        again = generate(model, padded(second), request.generate_kwargs(), NEW).sequences[:, -NEW:].tolist()
    assert again == [alone(model, prompt) for prompt in second]


def test_a_row_that_is_dropped_gives_its_memory_back(tmp_path: Path) -> None:
    model = model_of("llama")
    with attach(model, tmp_path / "store") as memory:
        request = memory.request()
        generate(model, padded(PROMPTS), request.generate_kwargs(), NEW)
        assert memory.arena.used_slots == 3 * (2 + 3 + 2)
        request.cache.batch_select_indices(torch.tensor([0]))
        assert memory.arena.used_slots == 3 * 2
        assert request.token_ids[:61] == PROMPTS[0]
        request.close()
        assert memory.arena.used_slots == 0
