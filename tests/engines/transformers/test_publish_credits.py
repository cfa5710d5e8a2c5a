"""With credits for one chunk at a time on its way to the store, generation gives the same bits and loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks_and_faults import GatedFiles
from engine_cases import CHUNK, attach, budget_of, chunk_files, generate, logits, prompt

from kvstrata.cost.credits import Credits
from kvstrata.engines.transformers.context import segment_layout
from kvstrata.engines.transformers.parts import MemoryParts
from kvstrata.errors import ConfigurationError
from kvstrata.store import Store
from kvstrata.store.publication_queue import chunk_credits

LAYERS = 3
LENGTH = 8 * CHUNK + 10
NEW = 5


@pytest.mark.parametrize("narrow", [False, True])
def test_small_credits_change_no_bit(tiny_llama: Callable[..., Any], tmp_path: Path, narrow: bool) -> None:
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    with attach(model, tmp_path / "plain", prefill_chunk=CHUNK) as memory:
        expected = logits(generate(model, ids, NEW, memory.generate_kwargs()))
        assert memory.ledger().publish_waited == 0
    one = chunk_credits(LAYERS * segment_layout(model, CHUNK).segment_bytes)
    budget = budget_of(model, 2 * LAYERS + 8, prefill=CHUNK) if narrow else None
    root = tmp_path / "store"
    with (
        Store(root) as store,
        attach(model, store, budget=budget, prefill_chunk=CHUNK, parts=MemoryParts(publish_credits=one)) as memory,
    ):
        assert torch.equal(logits(generate(model, ids, NEW, memory.generate_kwargs())), expected)
        assert memory.save("talk").chunks == 9
        assert len(chunk_files(root)) == 9
        assert memory.publisher is not None
        assert (memory.publisher.pool.outstanding, memory.publisher.pool.free) == ((), one)


def test_what_waits_for_credits_is_counted_and_saved(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """The disk takes nothing until the answer is there."""
    model, ids, files = tiny_llama(layers=LAYERS), prompt(LENGTH), GatedFiles()
    one = chunk_credits(LAYERS * segment_layout(model, CHUNK).segment_bytes)
    with (
        Store(tmp_path / "store", files=files) as store,
        attach(model, store, prefill_chunk=CHUNK, parts=MemoryParts(publish_credits=one)) as memory,
    ):
        generate(model, ids, NEW, memory.generate_kwargs())
        assert memory.publisher is not None
        assert (memory.publisher.pending, memory.publisher.waiting) == (8, 7)
        assert memory.ledger().publish_waited == 7
        files.gate.set()
        assert memory.save("talk").chunks == 9
        assert memory.ledger().publish_waited_s > 0
    assert len(chunk_files(tmp_path / "store")) == 9


def test_credits_that_no_chunk_fits_are_refused(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama(layers=LAYERS)
    with pytest.raises(ConfigurationError, match="publish_credits"):
        attach(model, tmp_path / "store", parts=MemoryParts(publish_credits=Credits(1, 1, 1, 1)))
    with Store(tmp_path / "store") as store:
        assert store.collect(()).reason is None, "the store that was opened for it is closed"
