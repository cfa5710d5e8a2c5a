"""A full disk under a running model: it goes on while memory lasts, then says so, and nothing is lost."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks_and_faults import FaultyFiles
from engine_cases import CHUNK, attach, budget_of, generate, logits, prompt

from kvstrata.errors import Reason, StoreError
from kvstrata.sessions import SessionStore
from kvstrata.store import Store

LAYERS = 3
LENGTH = 5 * CHUNK + 50
NEW = 30


@pytest.mark.parametrize("call", ["pwritev", "allocate", "link"])
def test_generation_goes_on_while_memory_lasts(tiny_llama: Callable[..., Any], tmp_path: Path, call: str) -> None:
    """Six chunks fit the memory; the step that needs a seventh is refused, and works once there is room again."""
    model, ids, files = tiny_llama(layers=LAYERS), prompt(LENGTH), FaultyFiles()
    with attach(model, tmp_path / "undisturbed") as memory:
        expected = generate(model, ids, NEW, memory.generate_kwargs())
    with (
        Store(tmp_path / "store", files=files) as store,
        attach(model, store, budget=budget_of(model, 6 * LAYERS)) as memory,
    ):
        files.named[call] = errno.ENOSPC
        request = memory.request()
        with pytest.raises(StoreError) as refusal:
            generate(model, ids, NEW, request.generate_kwargs())
        assert refusal.value.reason is Reason.STORE_FULL
        assert request.frontier == 6 * CHUNK
        assert request.token_ids == expected.sequences[0, : 6 * CHUNK].tolist()
        assert memory.ledger().traffic["file_writes"].moved_bytes == 0
        with pytest.raises(StoreError) as refusal:
            memory.save("talk")
        assert refusal.value.reason is Reason.STORE_FULL
        assert SessionStore(store).list() == []
        files.named.clear()
        head = expected.sequences[:, : 6 * CHUNK + 1]
        ours = generate(model, head, LENGTH + NEW - head.shape[1], request.generate_kwargs())
        assert torch.equal(logits(ours), logits(expected)[6 * CHUNK + 1 - LENGTH :])
        assert memory.save("talk").frontier == LENGTH + NEW - 1
        assert all(verdict.sound for verdict in store.verify())


def test_a_cap_is_a_full_disk(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    with Store(tmp_path / "store", max_bytes=100_000) as store, attach(model, store) as memory:
        generate(model, ids, 20, memory.generate_kwargs())
        with pytest.raises(StoreError) as refusal:
            memory.save("talk")
        assert refusal.value.reason is Reason.STORE_FULL
        assert store.usage().total_bytes <= 100_000
        generate(model, ids, 20, memory.generate_kwargs())


def test_a_disk_that_fails_to_read_is_not_a_damaged_chunk(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing is recomputed or thrown away: the step is refused, and works when the disk does."""
    model, ids, files = tiny_llama(layers=LAYERS), prompt(LENGTH), FaultyFiles()
    with attach(model, tmp_path / "undisturbed") as memory:
        expected = generate(model, ids, 4, memory.generate_kwargs())
    with (
        Store(tmp_path / "store", files=files) as store,
        attach(model, store, budget=budget_of(model, 2 * LAYERS + 8)) as memory,
    ):
        request = memory.prefill(ids[0].tolist())
        memory.save("talk")
        request.plan.yield_memory()
        files.named["preadv"] = errno.EIO
        with pytest.raises(StoreError) as refusal:
            generate(model, ids, 4, request.generate_kwargs())
        assert refusal.value.reason is Reason.STORE_IO
        files.named.clear()
        ours = generate(model, ids, 4, request.generate_kwargs())
        assert torch.equal(logits(ours), logits(expected))
        assert memory.ledger().recomputes == ()
        assert store.usage().damaged == 0
