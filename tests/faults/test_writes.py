"""Writes that fail, are lost, or never end, while SmolLM2 generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import CHUNK, generate, logits
from fault_runs import BOTH, CHUNKS, LAYERS, SETUPS, SavedModel, Setup, once

from kvstrata.contract.states import FileReplicaState
from kvstrata.errors import Reason, StoreError
from kvstrata.sessions import SessionStore
from kvstrata.tiers.fault_plan import Fault, FaultPlan, Injection

SHORT = 3 * CHUNK + 5
ROOM = 2 * LAYERS + 2 * 3
"""Slots for two open chunks, and two layers of the three sealed ones."""

ROOMY = Setup("room for three chunks", slots=3 * LAYERS)


def other_prompt(smol: SavedModel, first: int = 0) -> torch.Tensor:
    """A shorter prompt of which nothing is stored."""
    return torch.roll(smol.ids, first + 1, dims=1)[:, :SHORT]


def undisturbed(smol: SavedModel, folder: Path, setup: Setup, ids: torch.Tensor, new: int) -> torch.Tensor:
    with smol.scene(folder, setup, at="nowhere") as scene:
        scene.request.close()
        return logits(generate(smol.model, ids, new, scene.memory.generate_kwargs()))


@pytest.mark.faults
@BOTH
@pytest.mark.parametrize("operation", ["allocate", "pwritev"])
def test_a_full_disk_is_a_refusal_and_serving_goes_on(
    smol: SavedModel, tmp_path: Path, setup: Setup, operation: str
) -> None:
    """LMCache#1454, #4664: a full disk broke the server. What is stored is still read, and where there is host memory
    nothing is refused at all."""
    tight = Setup(setup.name, setup.host, ROOM)
    ids = other_prompt(smol)
    expected = undisturbed(smol, tmp_path / "undisturbed", tight, ids, 2)
    plan = FaultPlan(rates={Fault.FILL_UP: 1.0}, operations=frozenset({operation}))
    with smol.scene(tmp_path / "store", tight, plan, at="files") as scene:
        scene.request.close()
        request = scene.memory.request()
        if not setup.host:
            with pytest.raises(StoreError) as refusal:
                generate(smol.model, ids, 2, request.generate_kwargs())
            assert refusal.value.reason is Reason.STORE_FULL
            assert request.token_ids == ids[0, : request.frontier].tolist()
            written = scene.memory.ledger().traffic["file_writes"].moved_bytes
            assert written == 0
            assert scene.store.usage().temporary == 0
            scene.injector.enabled = False
        found = logits(generate(smol.model, ids, 2, request.generate_kwargs()))
        assert torch.equal(found, expected)
        assert ("allocate" if operation == "allocate" else "pwritev", "fill_up") in scene.faults
        if setup.host:
            assert scene.memory.publisher is not None
            assert scene.memory.publisher.totals.failures > 0
            assert scene.memory.ledger().traffic["host"].moved_bytes > 0
        assert scene.recomputed == []
        assert all(verdict.sound for verdict in scene.store.verify())
        scene.account()


@pytest.mark.faults
@BOTH
def test_the_cap_counts_temporary_files_and_is_a_full_disk(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """LMCache#1454: the disk tier passed its cap by far."""
    expected = smol.expected(setup)
    ids = other_prompt(smol)
    roomy = Setup(setup.name, setup.host, setup.slots + 4 * LAYERS)
    with smol.scene(tmp_path / "store", roomy, at="nowhere", store={"max_bytes": 21_000_000}) as scene:
        used = scene.store.usage().total_bytes
        request = scene.memory.prefill(ids[0].tolist())
        with pytest.raises(StoreError) as refusal:
            scene.memory.save("other", request)
        assert refusal.value.reason is Reason.STORE_FULL
        assert used <= scene.store.usage().total_bytes <= 21_000_000
        assert [item.latest.name for item in SessionStore(scene.store).list() if item.latest] == ["talk"]
        request.close()
        assert torch.equal(scene.run(), expected), "what was stored is served"
        assert scene.store.usage().temporary == 0
        scene.account()


@SETUPS
def test_a_write_that_was_acknowledged_and_lost_is_written_again(
    smol: SavedModel, tmp_path: Path, setup: Setup
) -> None:
    """llm-d-kv-cache#457: a dropped write is a miss, never a hang and never a wrong row. It is noticed when the chunk
    is to be held in the store; until it is there its rows stay in memory."""
    ids = other_prompt(smol)
    tight = Setup(setup.name, setup.host, ROOM)
    expected = undisturbed(smol, tmp_path / "undisturbed", tight, ids, 2)
    with smol.scene(tmp_path / "store", tight, once("write", 2, Fault.LOSE)) as scene:
        scene.request.close()
        request = scene.memory.prefill(ids[0].tolist())
        publisher = scene.memory.publisher
        assert publisher is not None
        publisher.wait()
        record = request.history.chunks[2]
        assert scene.faults == [("write", "lose")]
        assert record.failure is not None
        assert (record.file, record.failure.reason) == (FileReplicaState.FAILED, Reason.CHUNK_MISSING)
        assert (publisher.totals.failures, record.resident) == (1, LAYERS)
        assert not scene.store.tier.has(record.digest)
        found = logits(generate(smol.model, ids, 2, request.generate_kwargs()))
        assert torch.equal(found, expected)
        assert scene.recomputed == []
        scene.memory.save("other", request)
        assert scene.store.tier.has(record.digest)
        assert all(verdict.sound for verdict in scene.store.verify())
        scene.account()


@SETUPS
def test_no_chunk_is_a_hit_before_its_producer_has_finished(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """vllm#45704. The write hangs in the middle of the file; the model computes on in the slots that are left."""
    ids, roomy = other_prompt(smol), Setup(setup.name, setup.host, 3 * LAYERS)
    expected = undisturbed(smol, tmp_path / "undisturbed", roomy, ids[:, : CHUNK + 5], 2)
    with smol.scene(tmp_path / "store", roomy, once("pwritev", 0, Fault.HANG), at="files") as scene:
        scene.request.close()
        request = scene.memory.request()
        found = logits(generate(smol.model, ids[:, : CHUNK + 5], 2, request.generate_kwargs()))
        (record,) = request.history.chunks
        assert record.file is FileReplicaState.WRITING
        assert not scene.store.tier.has(record.digest)
        assert scene.store.usage().temporary == 1
        assert record.durable.generation == 0
        scene.injector.let_go()
        assert scene.memory.publisher is not None
        scene.memory.publisher.wait(record)
        assert record.file is FileReplicaState.PUBLISHED
        assert record.durable.generation > 0
        assert scene.store.tier.has(record.digest)
        assert torch.equal(found, expected)
        scene.account()


@pytest.mark.faults
@BOTH
def test_slow_writes_make_the_producer_wait_inside_the_budget(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """vllm#50031: unbounded writes filled the memory, then deadlocked."""
    ids = other_prompt(smol)
    tight = Setup(setup.name, setup.host, ROOM)
    expected = undisturbed(smol, tmp_path / "undisturbed", tight, ids, 2)
    plan = FaultPlan(rates={Fault.DELAY: 1.0}, operations=frozenset({"write"}), delay_s=0.02)
    with smol.scene(tmp_path / "store", tight, plan) as scene:
        scene.request.close()
        found = logits(generate(smol.model, ids, 2, scene.memory.generate_kwargs()))
        assert torch.equal(found, expected)
        assert scene.faults.count(("write", "delay")) == 3
        assert scene.memory.arena.peak_slots <= ROOM
        assert scene.memory.ledger().exposed_stall_s > 0
        scene.account()


@pytest.mark.faults
@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.LOSE, Fault.SHORTEN, Fault.DUPLICATE, Fault.REORDER])
def test_what_reads_back_otherwise_than_it_was_written_is_not_published(
    smol: SavedModel, tmp_path: Path, fault: Fault
) -> None:
    """A write is read back before it gets its name; short, doubled and late ones are put right on the way."""
    ids = other_prompt(smol)[:, : CHUNK + 5]
    expected = undisturbed(smol, tmp_path / "undisturbed", ROOMY, ids, 2)
    with smol.scene(tmp_path / "store", ROOMY, once("pwritev", 0, fault), at="files") as scene:
        scene.request.close()
        request = scene.memory.request()
        found = logits(generate(smol.model, ids, 2, request.generate_kwargs()))
        assert torch.equal(found, expected)
        assert scene.memory.publisher is not None
        scene.memory.publisher.wait()
        spoiled = fault in (Fault.CORRUPT, Fault.LOSE)
        assert scene.memory.publisher.totals.failures == spoiled
        (record,) = request.history.chunks
        assert record.file is (FileReplicaState.FAILED if spoiled else FileReplicaState.PUBLISHED)
        if spoiled:
            assert record.failure is not None
            assert record.failure.reason is Reason.STORE_IO
        assert scene.memory.save("other", request).chunks == 2, "the next try writes it"
        assert all(verdict.sound for verdict in scene.store.verify())
        scene.account()


@pytest.mark.faults
def test_a_name_that_was_lost_is_no_hit(smol: SavedModel, tmp_path: Path) -> None:
    """The file system acknowledged the name and forgot it: the chunk is missing, and the session is not saved."""
    ids = other_prompt(smol)[:, : CHUNK + 5]
    plan = FaultPlan(explicit=(Injection("link", 0, Fault.LOSE),))
    with smol.scene(tmp_path / "store", ROOMY, plan, at="files") as scene:
        scene.request.close()
        request = scene.memory.request()
        generate(smol.model, ids, 2, request.generate_kwargs())
        assert scene.memory.publisher is not None
        scene.memory.publisher.wait()
        (record,) = request.history.chunks
        assert not scene.store.tier.has(record.digest)
        receipt = scene.memory.save("other", request)
        assert receipt.chunks == 2
        assert scene.store.tier.has(record.digest), "a save looks again, and writes what is not there"
        assert scene.store.usage().chunks > CHUNKS
        scene.account()
