"""Faults of running engines that people reported against other systems, each as a kind of fault.

The number of the public report stands beside each test.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks_and_faults import flip
from engine_cases import (
    CHUNK,
    attach,
    budget_of,
    chunk_files,
    double_logits,
    generate,
    least_budget,
    logits,
    prompt,
    rms,
    rows_of,
    stock,
)

from kvstrata.errors import KvstrataError, Reason, SessionError, StateError
from kvstrata.store import Store
from kvstrata.tiers.files import OsFiles

LAYERS = 3
LENGTH = 6 * CHUNK + 21
NEW = 6


@pytest.fixture
def model(tiny_llama: Callable[..., Any]) -> Any:
    return tiny_llama("bfloat16", layers=LAYERS)


@pytest.fixture
def cold(model: Any, tmp_path: Path) -> torch.Tensor:
    """Logits of a run that never leaves memory."""
    with attach(model, tmp_path / "cold") as memory:
        return logits(generate(model, prompt(LENGTH), NEW, memory.generate_kwargs()))


def test_the_bits_are_the_same_at_any_load(model: Any, cold: torch.Tensor, tmp_path: Path) -> None:
    """vllm#31210: output was garbled when offloading ran under load."""
    budget, stop = least_budget(model, LENGTH + NEW, tmp_path / "probe"), threading.Event()
    noise = [threading.Thread(target=lambda: [os.urandom(1 << 20) for _ in iter(stop.is_set, True)]) for _ in range(2)]
    for thread in noise:
        thread.start()
    try:
        for readers in (1, 3):
            with attach(model, tmp_path / "store", budget=budget, readers=readers) as memory:
                ours = generate(model, prompt(LENGTH), NEW, memory.generate_kwargs())
                assert memory.ledger().traffic["file"].moved_bytes > 0
            assert torch.equal(logits(ours), cold)
    finally:
        stop.set()
        for thread in noise:
            thread.join()


class _SlowWrites(OsFiles):
    def pwritev(self, fd: int, buffers: Any, offset: int, /) -> int:
        time.sleep(0.002)
        return os.pwritev(fd, buffers, offset)


class _SlowReads(OsFiles):
    def preadv(self, fd: int, buffers: Any, offset: int, /) -> int:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.001)
        return os.preadv(fd, buffers, offset)


@pytest.mark.parametrize("files", [_SlowWrites(), _SlowReads()], ids=["writes", "reads"])
def test_slots_are_reused_only_after_slow_transfers(
    model: Any, cold: torch.Tensor, tmp_path: Path, files: OsFiles
) -> None:
    """sglang PR#36738 and PR#28468: a restore raced with a page's previous owner; a copy was evicted while read."""
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    with Store(tmp_path / "store", files=files) as store, attach(model, store, budget=budget) as memory:
        ours = generate(model, prompt(LENGTH), NEW, memory.generate_kwargs())
        memory.latest.close()
        again = generate(model, prompt(LENGTH), NEW, memory.generate_kwargs())
        assert all(verdict.sound for verdict in store.verify())
    assert torch.equal(logits(ours), cold)
    assert torch.equal(logits(again), cold)


def test_closing_in_the_middle_of_transfers_frees_every_slot_once(model: Any, tmp_path: Path) -> None:
    """vllm PR#32255: an aborted load freed its blocks early, or never."""
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    with Store(tmp_path / "store", files=_SlowReads()) as store, attach(model, store, budget=budget) as memory:
        for _ in range(4):
            request = memory.prefill(prompt(LENGTH)[0].tolist())
            request.plan.yield_memory()
            request.plan.begin_step(1)
            assert memory.arena.used_slots > LAYERS
            request.close()
            memory.publisher.wait()  # type: ignore[union-attr]
            assert memory.arena.used_slots == 0
            assert len(memory.directory) == 0


def test_a_failed_load_is_a_miss_once_and_a_hit_again(model: Any, tmp_path: Path) -> None:
    """vllm#49176: a load that failed stayed a hit and was tried for ever."""
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    with attach(model, tmp_path / "store", budget=budget) as memory:
        request = memory.prefill(prompt(LENGTH)[0].tolist())
        memory.save("talk")
        request.plan.yield_memory()
        path = memory.store.tier.path(request.history.chunks[2].digest)
        flip(path, path.stat().st_size - 50)
        generate(model, prompt(LENGTH), NEW, request.generate_kwargs())
        generate(model, prompt(LENGTH + NEW), NEW, request.generate_kwargs())
        assert [item.reason for item in memory.ledger().recomputes] == [Reason.CHUNK_DAMAGED]
        assert memory.store.usage().damaged == 1
        assert memory.store.tier.has(request.history.chunks[2].digest)


def test_recomputed_rows_give_the_answer_of_a_cold_run(model: Any, cold: torch.Tensor, tmp_path: Path) -> None:
    """vllm#49250: the recompute fallback gave another answer."""
    with attach(model, tmp_path / "store") as memory:
        memory.prefill(prompt(LENGTH)[0].tolist())
        memory.save("talk")
    for chunk in chunk_files(tmp_path / "store"):
        flip(chunk, chunk.stat().st_size - 50)
    with attach(model, tmp_path / "store") as memory:
        request, _ = memory.restore("talk", prompt(LENGTH)[0].tolist())
        ours = generate(model, prompt(LENGTH), NEW, request.generate_kwargs())
        assert memory.ledger().tokens_recomputed > 0
    assert torch.equal(logits(ours), cold)


def test_wrong_bytes_of_the_right_length_never_reach_a_kernel(model: Any, cold: torch.Tensor, tmp_path: Path) -> None:
    """vllm#54363: they were loaded silently."""
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    with attach(model, tmp_path / "store", budget=budget) as memory:
        request = memory.prefill(prompt(LENGTH)[0].tolist())
        memory.save("talk")
        request.plan.yield_memory()
        first, second = (memory.store.tier.path(record.digest) for record in request.history.chunks[:2])
        whole, size = bytearray(first.read_bytes()), memory.layout.segment_bytes
        whole[-size:] = second.read_bytes()[-size:]
        first.write_bytes(whole)
        ours = generate(model, prompt(LENGTH), NEW, request.generate_kwargs())
        assert memory.ledger().recomputes[0].start == 0
    assert torch.equal(logits(ours), cold)


def test_nothing_is_shared_across_tenants_and_salts(model: Any, tmp_path: Path) -> None:
    """LMCache#4825, sglang#37160: the salt was dropped, and one tenant was served another's prefix."""
    ids, names = prompt(2 * CHUNK + 1)[0].tolist(), [("a", ""), ("b", ""), ("a", "x"), ("a", "y"), ("", "ax")]
    seen: set[str] = set()
    for number, (tenant, salt) in enumerate(names, 1):
        with attach(model, tmp_path / "store", tenant=tenant, salt=salt) as memory:
            request = memory.prefill(ids)
            digests = {record.digest.hex() for record in request.history.chunks}
            assert not digests & seen
            seen |= digests
            memory.save("talk", request)
            assert memory.ledger().traffic["file_writes"].resident_hit_bytes == 0
        assert len(chunk_files(tmp_path / "store")) == 2 * number
    with attach(model, tmp_path / "store", tenant="c") as memory, pytest.raises(SessionError) as refusal:
        memory.restore("talk", ids)
    assert refusal.value.reason is Reason.SESSION_UNKNOWN


def test_the_token_ids_are_compared_on_a_hit(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#12621: a short hash collided and foreign blocks were used. Here every chunk collides with every other."""
    from kvstrata.contract import identity

    real = identity.digest
    monkeypatch.setattr(
        identity, "digest", lambda domain, value: bytes(32) if domain == "chunk/1" else real(domain, value)
    )
    with attach(model, tmp_path / "store") as memory:
        memory.prefill(prompt(CHUNK + 1)[0].tolist())
        memory.save("talk")
        other = prompt(CHUNK + 1, seed=9)[0].tolist()
        request, receipt = memory.restore("talk", other)
        assert receipt.restored_tokens == 0
        assert receipt.reason is Reason.TOKENS_DIFFER
        with pytest.raises(KvstrataError):
            memory.prefill(other, request)


def test_a_forgotten_request_pins_nothing_that_others_need(model: Any, cold: torch.Tensor, tmp_path: Path) -> None:
    """LMCache#1034, #2942: what was never retrieved stayed pinned, and a full buffer made a request spin."""
    budget = budget_of(model, LAYERS + 2 * LAYERS + 10)
    with attach(model, tmp_path / "store", budget=budget) as memory:
        memory.prefill(prompt(LENGTH)[0].tolist())
        memory.save("talk")
        memory.restore("talk")[0].close()
        ours = generate(model, prompt(LENGTH), NEW, memory.generate_kwargs())
        assert memory.ledger().peak_device_bytes <= budget
    assert torch.equal(logits(ours), cold)


def test_slow_writes_make_the_producer_wait_inside_the_budget(model: Any, cold: torch.Tensor, tmp_path: Path) -> None:
    """llm-d-kv-cache#457, vllm#50031: unbounded writes filled the memory, then deadlocked."""
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    with Store(tmp_path / "store", files=_SlowWrites()) as store, attach(model, store, budget=budget) as memory:
        ours = generate(model, prompt(LENGTH), NEW, memory.generate_kwargs())
        ledger = memory.ledger()
        assert ledger.peak_device_bytes <= budget
        assert ledger.exposed_stall_s > 0
    assert torch.equal(logits(ours), cold)


def test_positions_are_counted_and_never_guessed(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """transformers#18104, kvpress#16: padded or rebuilt caches got wrong positions."""
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    ids[0, :CHUNK] = 3
    mask = torch.ones_like(ids)
    expected = stock(model, ids, NEW, attention_mask=mask)
    truth = double_logits(model, expected.sequences)[LENGTH - 1 : -1]
    with attach(model, tmp_path / "store") as memory:
        memory.save("talk", memory.prefill(ids[0].tolist()))
        request, _ = memory.restore("talk", ids[0].tolist())
        ours = generate(model, ids, NEW, request.generate_kwargs(), attention_mask=mask)
        rows = rows_of(memory, request, LENGTH)
        # Padding in front moves no token from its position: its rows are those of the unpadded prompt.
        front = torch.ones_like(ids)
        front[0, :CHUNK] = 0
        padded = generate(model, ids, NEW, memory.generate_kwargs(), attention_mask=front)
        assert memory.latest.token_ids == padded.sequences[0, CHUNK:-1].tolist()
        shorter = generate(model, ids[:, CHUNK:], NEW, memory.generate_kwargs())
        torch.testing.assert_close(logits(padded), logits(shorter), atol=1e-4, rtol=0)
    assert rms(logits(ours) - truth).max() <= 1.5 * rms(logits(expected) - truth).max()
    # The same token at another position has another key, turned by the rotary rule.
    assert not torch.equal(rows[0][0][:, 0], rows[0][0][:, 1])


def test_two_attachments_do_not_share_a_budget(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """sglang#38156: several workers each reserved the whole pinned budget. One model has one reservation."""
    model = tiny_llama()
    with attach(model, tmp_path / "store") as memory:
        other = attach(model, tmp_path / "store")
        with pytest.raises(StateError) as refusal:
            other.__enter__()
        assert refusal.value.reason is Reason.ALREADY_ATTACHED
        for _ in range(3):
            memory.prefill([1] * 100)
        assert memory.ledger().peak_device_bytes <= memory.budget


def test_numerators_and_denominators_of_traffic(model: Any, tmp_path: Path) -> None:
    """vllm PR#30522, dynamo#4840: hit rates had wrong denominators. Every byte asked for is a hit or was moved."""
    budget = budget_of(model, 2 * LAYERS + 2 * LAYERS + 6)
    with attach(model, tmp_path / "store", budget=budget) as memory:
        request = memory.prefill(prompt(LENGTH)[0].tolist())
        before = memory.ledger().traffic
        steps = []
        for _ in range(5):
            model(prompt(1), past_key_values=request.cache)
            assert request.last_step is not None
            steps.append(request.last_step)
        after = memory.ledger().traffic
        asked = sum(step.visible for step in steps) * LAYERS * memory.layout.row_bytes
        moved = sum(step.moved_bytes for step in steps)
        assert moved > 0
        assert after["device"].requested_bytes - before["device"].requested_bytes == asked
        assert after["file"].moved_bytes - before["file"].moved_bytes == moved
        assert after["device"].resident_hit_bytes - before["device"].resident_hit_bytes == asked - moved
