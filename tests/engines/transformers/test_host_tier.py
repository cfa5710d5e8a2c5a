"""A host tier between device and files: the same bits, fewer reads, and a place for what cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks_and_faults import FaultyFiles
from engine_cases import CHUNK, attach, budget_of, generate, logits, prompt, require_within_budget

from kvstrata.engines.transformers.context import segment_layout
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.store import Store

LAYERS = 3
CHUNKS = 8
SLOTS = 2 * LAYERS + CHUNKS
LENGTH = CHUNKS * CHUNK + 10
NEW = 6


def host_budget(model: Any, slots: int) -> int:
    return slots * (-(-segment_layout(model, CHUNK).segment_bytes // 4096) * 4096)


@pytest.fixture
def expected(tiny_llama: Callable[..., Any], tmp_path: Path) -> torch.Tensor:
    model = tiny_llama(layers=LAYERS)
    with attach(model, tmp_path / "undisturbed", prefill_chunk=CHUNK) as memory:
        return logits(generate(model, prompt(LENGTH), NEW, memory.generate_kwargs()))


@pytest.mark.parametrize("slots", [1, 5, CHUNKS * LAYERS])
def test_any_size_gives_the_same_bits_and_counts_where_they_came_from(
    tiny_llama: Callable[..., Any], tmp_path: Path, expected: torch.Tensor, slots: int
) -> None:
    model = tiny_llama(layers=LAYERS)
    budget, host = budget_of(model, SLOTS, prefill=CHUNK), host_budget(model, slots)
    with attach(model, tmp_path / "store", budget=budget, host_budget=host, prefill_chunk=CHUNK) as memory:
        request = memory.request()
        ours = logits(generate(model, prompt(LENGTH), NEW, request.generate_kwargs()))
        require_within_budget(memory)
        ledger, step = memory.ledger(), request.last_step
        assert step is not None
        assert memory.host is not None
        arena = memory.host.arena
        assert ledger.host_bytes == memory.layout.segment_bytes * arena.used_slots > 0
        # What was read ahead of a step that planned anew is a hit, and moved nothing that a step used.
        assert memory.host.totals.hit_bytes >= ledger.traffic["host"].moved_bytes > 0
        assert (ledger.traffic["file"].moved_bytes == 0) is (slots == CHUNKS * LAYERS)
        if slots == CHUNKS * LAYERS:
            assert step.host_bytes == step.moved_bytes > 0, "all that is cold comes from the host tier"
        else:
            assert step.host_bytes < step.moved_bytes
        assert arena.peak_slots <= slots
        request.close()
        assert (arena.used_slots, memory.arena.used_slots) == (0, 0)
    assert torch.equal(ours, expected)


def test_a_store_that_cannot_be_written_to_is_no_limit_while_host_memory_lasts(
    tiny_llama: Callable[..., Any], tmp_path: Path, expected: torch.Tensor
) -> None:
    """The host's copy is the authority then: nothing is lost, and nothing is refused."""
    model = tiny_llama(layers=LAYERS)
    Store(tmp_path / "store").close()
    budget, host = budget_of(model, SLOTS, prefill=CHUNK), host_budget(model, CHUNKS * LAYERS)
    with (
        Store(tmp_path / "store", read_only=True) as store,
        attach(model, store, budget=budget, host_budget=host, prefill_chunk=CHUNK) as memory,
    ):
        request = memory.request()
        ours = logits(generate(model, prompt(LENGTH), NEW, request.generate_kwargs()))
        assert {record.authority for record in request.history.chunks} <= {"host", "device", ""}
        assert memory.ledger().traffic["file"].moved_bytes == 0
    assert torch.equal(ours, expected)


def test_a_full_disk_is_no_limit_while_host_memory_lasts(
    tiny_llama: Callable[..., Any], tmp_path: Path, expected: torch.Tensor
) -> None:
    model, files = tiny_llama(layers=LAYERS), FaultyFiles()
    budget, host = budget_of(model, SLOTS, prefill=CHUNK), host_budget(model, CHUNKS * LAYERS)
    with (
        Store(tmp_path / "store", files=files) as store,
        attach(model, store, budget=budget, host_budget=host, prefill_chunk=CHUNK) as memory,
    ):
        files.named["pwritev"] = errno.ENOSPC
        ours = logits(generate(model, prompt(LENGTH), NEW, memory.generate_kwargs()))
        assert memory.ledger().traffic["file_writes"].moved_bytes == 0
        files.named.clear()
        assert memory.save("talk").frontier == LENGTH + NEW - 1
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("on_file", [True, False])
def test_host_bytes_that_changed_are_read_or_computed_again(
    tiny_llama: Callable[..., Any], tmp_path: Path, expected: torch.Tensor, on_file: bool
) -> None:
    model = tiny_llama(layers=LAYERS)
    Store(tmp_path / "store").close()
    budget, host = budget_of(model, SLOTS, prefill=CHUNK), host_budget(model, CHUNKS * LAYERS)
    ids = prompt(LENGTH)
    with (
        Store(tmp_path / "store", read_only=None if on_file else True) as store,
        attach(model, store, budget=budget, host_budget=host, prefill_chunk=CHUNK) as memory,
    ):
        request = memory.prefill(ids[0].tolist())
        arena = memory.directory.host
        assert arena is not None
        hit = 0
        for record in request.history.chunks:
            grant = record.host.grants[1]
            if grant is not None and record.grants[1] is None:
                arena.backing.writable(grant.slot)[11] ^= 0x10
                hit += 1
        assert hit
        ours = logits(generate(model, ids, NEW, request.generate_kwargs()))
        ledger = memory.ledger()
        assert memory.host is not None
        assert memory.host.totals.damaged >= 1
        if on_file:
            assert ledger.tokens_recomputed == 0
        else:
            assert ledger.recomputes[0].reason is Reason.CHUNK_MISSING
            assert ledger.tokens_recomputed > 0
    assert torch.equal(ours, expected)


def test_requests_that_take_turns_give_their_rows_to_the_host(
    tiny_llama: Callable[..., Any], tmp_path: Path, expected: torch.Tensor
) -> None:
    model = tiny_llama(layers=LAYERS)
    ids, other = prompt(LENGTH), prompt(LENGTH, seed=2)
    with attach(model, tmp_path / "alone", prefill_chunk=CHUNK) as memory:
        second = logits(generate(model, other, NEW, memory.generate_kwargs()))
    budget, host = budget_of(model, 2 * LAYERS + CHUNKS + 3, prefill=CHUNK), host_budget(model, 2 * CHUNKS * LAYERS)
    with attach(model, tmp_path / "store", budget=budget, host_budget=host, prefill_chunk=CHUNK) as memory:
        requests = [memory.prefill(each[0].tolist()) for each in (ids, other)]
        found = [
            logits(generate(model, each, NEW, request.generate_kwargs()))
            for each, request in zip((ids, other), requests, strict=True)
        ]
        assert memory.ledger().traffic["host"].moved_bytes > 0
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], second)


def test_slots_are_zeroed_where_that_is_asked_for(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama(layers=LAYERS)
    host = host_budget(model, CHUNKS * LAYERS)
    budget = budget_of(model, SLOTS, prefill=CHUNK)
    for wipe in (True, False):
        with attach(
            model, tmp_path / f"store-{wipe}", budget=budget, host_budget=host, prefill_chunk=CHUNK, wipe=wipe
        ) as memory:
            request = memory.prefill(prompt(LENGTH)[0].tolist())
            arenas = [memory.arena, memory.directory.host]
            request.close()
            for arena in arenas:
                assert arena is not None
                assert arena.used_slots == 0
                bytes_left = sum(sum(arena.backing.readable(slot)) for slot in range(arena.slots))
                assert (bytes_left == 0) is wipe


@pytest.mark.parametrize(
    ("value", "what"), [(0, "1 to"), ("x", "number of bytes"), (100, "one segment"), (2**60, "has")]
)
def test_a_host_budget_that_cannot_be_is_refused(
    tiny_llama: Callable[..., Any], tmp_path: Path, value: Any, what: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"host_budget={value!r}.*{what}"):
        attach(tiny_llama(layers=LAYERS), tmp_path / "store", host_budget=value)
    assert not (tmp_path / "store").exists()
