"""Drafts that are rejected leave no trace; what is cropped is gone, wherever it lay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach, chunk_files
from matrix_runs import assistant_of, generate, model_of, padded, stock_cache, tokens

from kvstrata.errors import Reason, UnsupportedError

DRAFTS = [("llama", "look-up"), ("llama", "assisted"), ("gemma3", "look-up"), ("mistral", "assisted")]
PROMPT = tokens(30) * 4
NEW = CHUNK + 20
KEPT = (199, 190, 129, 128, 127, 70, 64, 1)
"""Rows of 200 that a crop leaves: of the open tail, up to a boundary, of a sealed chunk."""


def drafts(kind: str, family: str) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": 5} if kind == "look-up" else {"assistant_model": assistant_of(family)}


@pytest.mark.parametrize(("family", "kind"), DRAFTS)
def test_only_accepted_tokens_become_history(tmp_path: Path, family: str, kind: str) -> None:
    """Rounds pass several chunk boundaries; every chunk that was published or saved holds tokens of the answer."""
    model, options = model_of(family), drafts(kind, family)
    expected = generate(model, padded([PROMPT]), stock_cache(model), NEW).sequences[0].tolist()
    sealed: set[tuple[int, ...]] = set()
    with attach(model, tmp_path / "store", model_id="m") as memory:
        submit = memory.publish
        memory.publish = lambda record: (sealed.add(record.identity.token_ids), submit(record))[1]  # type: ignore[method-assign]
        ours = generate(model, padded([PROMPT]), memory.generate_kwargs(), NEW, **options).sequences[0].tolist()
        request = memory.latest
        assert ours == expected
        assert request.token_ids == ours[:-1]
        whole = len(request.token_ids) // CHUNK
        assert {chunk.identity.token_ids for chunk in request.history.chunks} == sealed
        assert sealed == {tuple(ours[i * CHUNK : (i + 1) * CHUNK]) for i in range(len(sealed))}
        assert memory.save("talk").frontier == len(ours) - 1
        assert len(chunk_files(tmp_path / "store")) == whole + 1
    with attach(model, tmp_path / "store", model_id="m") as memory:
        request, receipt = memory.restore("talk", [*ours, 5])
        assert receipt.restored_tokens == len(ours) - 1
        again = generate(model, padded([[*ours, 5]]), request.generate_kwargs(), 4).sequences[0].tolist()
    assert again == generate(model, padded([[*ours, 5]]), stock_cache(model), 4).sequences[0].tolist()


@pytest.mark.parametrize(("family", "kind"), DRAFTS)
def test_drafts_on_top_of_a_history(tmp_path: Path, family: str, kind: str) -> None:
    """After an answer that ended within its drafts, a prefill and a restore: stock caches do not allow any of them."""
    model, options = model_of(family), drafts(kind, family)
    free = generate(model, padded([PROMPT]), stock_cache(model), 20).sequences[0].tolist()
    end = free[len(PROMPT) + 11]
    expected = free[: free.index(end, len(PROMPT)) + 1]
    following = [*expected, *tokens(10, seed=7)]
    after = generate(model, padded([following]), stock_cache(model), 6).sequences[0].tolist()
    with attach(model, tmp_path / "store", model_id="m") as memory:
        request = memory.prefill(PROMPT)
        ours = generate(model, padded([PROMPT]), request.generate_kwargs(), 20, eos_token_id=end, **options)
        assert ours.sequences[0].tolist() == expected
        assert request.token_ids == expected[:-1]
        memory.save("talk", request)
        ours = generate(model, padded([following]), request.generate_kwargs(), 6, **options)
        assert ours.sequences[0].tolist() == after
        restored, receipt = memory.restore("talk", following)
        assert receipt.restored_tokens == len(expected) - 1
        ours = generate(model, padded([following]), restored.generate_kwargs(), 6, **options)
        assert ours.sequences[0].tolist() == after
        assert restored.token_ids == after[:-1]


def test_padding_counts_for_no_draft(tmp_path: Path) -> None:
    """Of 130 rows behind ten columns of padding the last five are drafts; the chunk they reach into is open."""
    model, ids = model_of("llama"), torch.tensor([[0] * 10 + (PROMPT * 2)[:130]])
    mask = (torch.arange(140) >= 10).long()[None]
    with attach(model, tmp_path / "store") as memory:
        request = memory.request()
        request.cache.activate_past_recording()
        model(ids, attention_mask=mask, past_key_values=request.cache, logits_to_keep=6)
        assert (request.frontier, request.history.committed, request.history.sealed) == (130, 125, CHUNK)
        request.cache.crop(-5)
        assert request.token_ids == (PROMPT * 2)[:125]
        assert memory.save("talk").frontier == 125


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:40], [*PROMPT[:60], 7, *PROMPT[61:], 9]])
def test_drafts_on_top_of_another_history_are_refused(tmp_path: Path, prompt: list[int]) -> None:
    """Rows that cover the whole prompt, more than it, or other tokens."""
    model = model_of("llama")
    with attach(model, tmp_path / "store") as memory:
        request = memory.prefill([*PROMPT, 5])
        with pytest.raises(UnsupportedError) as refusal:
            generate(model, padded([prompt]), request.generate_kwargs(), 6, prompt_lookup_num_tokens=5)
        assert refusal.value.reason is Reason.POSITIONS_UNSUPPORTED
        assert request.token_ids == PROMPT


@pytest.mark.parametrize(("keep", "relative"), [(0, True), *((k, r) for k in KEPT for r in (True, False))])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cropped_request_goes_on_like_a_fresh_one(tmp_path: Path, family: str, keep: int, relative: bool) -> None:
    """Into the open tail, into a sealed chunk, to its boundary, to nothing."""
    model, ids = model_of(family), tokens(200)
    following = [*ids[:keep], *tokens(25, seed=8)]
    with torch.no_grad():
        expected = model(torch.tensor([following]), use_cache=False).logits[0, keep:]
    with attach(model, tmp_path / "store", model_id="m") as memory:
        request = memory.request()
        model(torch.tensor([ids]), past_key_values=request.cache)
        request.cache.crop(keep - 200 if relative else keep)
        assert request.token_ids == ids[:keep]
        assert request.cache.get_seq_length() == request.width == keep
        ours = model(torch.tensor([following[keep:]]), past_key_values=request.cache).logits[0]
        assert request.token_ids == following
        assert memory.save("talk").frontier == len(following)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_crop_of_nothing_does_nothing(tmp_path: Path) -> None:
    with attach(model_of("llama"), tmp_path / "store") as memory:
        request = memory.prefill(tokens(101))
        for crop in (0, 100, 5000):
            request.cache.crop(crop)
            assert request.token_ids == tokens(100)


def test_crop_of_a_padded_batch(tmp_path: Path) -> None:
    """Columns are taken from all rows; some lose padding with it."""
    model, prompts = model_of("gemma3"), [tokens(40, seed=2), tokens(150, seed=3)]
    ids, mask = padded(prompts)
    with attach(model, tmp_path / "store") as memory:
        request = memory.request()
        model(ids, attention_mask=mask, past_key_values=request.cache)
        request.cache.crop(-30)
        assert [row.token_ids for row in request.rows] == [prompts[0][:10], prompts[1][:120]]
        request.cache.crop(-5)
        following = torch.tensor([tokens(20, seed=4), tokens(20, seed=5)])
        longer = torch.cat([mask[:, :115], torch.ones(2, 20, dtype=torch.long)], dim=1)
        ours = model(following, attention_mask=longer, past_key_values=request.cache).logits
        for row, (before, new) in enumerate(zip((prompts[0][:5], prompts[1][:115]), following.tolist(), strict=True)):
            assert request.rows[row].token_ids == [*before, *new]
            with torch.no_grad(), memory.stock():
                expected = model(torch.tensor([[*before, *new]]), use_cache=False).logits[0, -20:]
            torch.testing.assert_close(ours[row], expected, atol=1e-4, rtol=0)
