"""Reads that fail, bring other bytes, or find nothing, while SmolLM2 generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chunks_and_faults import flip
from engine_cases import CHUNK
from fault_runs import BOTH, CHUNKS, FILES, HOST, LAYERS, SEGMENTS, SETUPS, SavedModel, Setup, once

from kvstrata.contract.states import FileReplicaState
from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan, Injection

LAST = CHUNKS - 1
LAYER = 7


@SETUPS
def test_a_read_of_the_secondary_tier_that_is_dropped_is_refused_and_repeated(
    smol: SavedModel, tmp_path: Path, setup: Setup
) -> None:
    """The disk says EIO: the chunk is not damaged, so nothing is thrown away."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, once("read", LAYER * CHUNKS + 2, Fault.LOSE)) as scene:
        with pytest.raises(StoreError) as refusal:
            scene.run()
        assert (refusal.value.reason, type(refusal.value)) == (Reason.STORE_IO, StoreError)
        assert scene.promoter.queue.totals.failed == 1
        assert scene.memory.arena.used_slots == LAYERS, "the open tail's"
        assert torch.equal(scene.run(), expected)
        assert (scene.recomputed, scene.store.usage().damaged) == ([], 0)
        scene.account()


@SETUPS
def test_a_hit_that_is_no_arrival_is_computed_again(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """The last chunk is looked up and cannot be found by the time it is read."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, once("open_chunk", LAST, Fault.LOSE)) as scene:
        digest = scene.digest(LAST)
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == [(LAST * CHUNK, "chunk_missing")]
        ledger = scene.memory.ledger()
        assert ledger.tokens_recomputed == smol.ids.shape[1] - 1 - LAST * CHUNK
        assert ledger.tokens_restored == LAST * CHUNK
        assert scene.digest(LAST) == digest, "the same rows have the same name"
        scene.memory.save("talk")
        assert scene.request.history.chunks[LAST].file is FileReplicaState.PUBLISHED
        assert scene.restart().hit
        scene.account()


@SETUPS
def test_wrong_bytes_of_the_right_length_never_load(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """vllm#54363, vllm#49176. One bit of one read is another: found out, set aside, computed, and a hit again."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, at="files") as scene:
        # Two reads open each chunk, then one for each chunk of a layer: this is the last chunk's of layer 7.
        digest, before = scene.digest(LAST), scene.injector.calls.get("preadv", 0)
        plan = once("preadv", before + 2 * CHUNKS + LAYER * CHUNKS + LAST, Fault.CORRUPT)
        scene.injector.plan = plan
        assert torch.equal(scene.run(), expected)
        assert scene.faults == [("preadv", "corrupt")]
        assert [(item.start, item.reason) for item in scene.memory.ledger().recomputes] == [
            (LAST * CHUNK, Reason.CHUNK_DAMAGED)
        ]
        assert digest.hex() in scene.memory.ledger().recomputes[0].detail
        assert scene.store.usage().damaged == 1
        scene.memory.save("talk")
        assert scene.digest(LAST) == digest
        assert scene.store.tier.has(digest)
        assert all(verdict.sound for verdict in scene.store.verify())
        assert scene.restart().hit
        assert torch.equal(scene.run(), expected)
        assert len(scene.recomputed) == 1
        scene.account()


@pytest.mark.faults
@BOTH
@pytest.mark.parametrize(("fault", "reason"), [(Fault.SHORTEN, "chunk_truncated"), (Fault.CORRUPT, "chunk_damaged")])
def test_a_copy_that_ends_short_is_never_published(
    smol: SavedModel, tmp_path: Path, setup: Setup, fault: Fault, reason: str
) -> None:
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, once("read", LAYER * CHUNKS + LAST, fault)) as scene:
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == [(LAST * CHUNK, reason)]
        assert scene.promoter.queue.totals.failed >= 1
        assert scene.store.usage().damaged == 1
        scene.account()


@pytest.mark.faults
@BOTH
def test_when_everything_stored_is_lost_the_answer_is_that_of_a_cold_run(
    smol: SavedModel, tmp_path: Path, setup: Setup
) -> None:
    """vllm#49250: the recompute fallback gave another answer."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, FaultPlan(explicit=(Injection("open_chunk", 0, Fault.LOSE),))) as scene:
        assert torch.equal(scene.run(), expected)
        assert torch.equal(expected, smol.cold)
        assert scene.recomputed == [(0, "chunk_missing")]
        ledger = scene.memory.ledger()
        assert (ledger.tokens_recomputed, ledger.tokens_restored) == (smol.ids.shape[1] - 1, 0)
        scene.account()


@pytest.mark.faults
def test_a_disk_that_never_reads_right_ends_in_an_error_and_not_in_a_loop(smol: SavedModel, tmp_path: Path) -> None:
    """vllm#49176: the same load was tried for ever. Here: a bounded number of times, and the rows are not lost."""
    plan = FaultPlan(rates={Fault.CORRUPT: 1.0}, operations=frozenset({"read"}))
    with smol.scene(tmp_path / "store", plan=plan) as scene:
        with pytest.raises(DamagedError) as refusal:
            scene.run()
        assert refusal.value.reason is Reason.CHUNK_DAMAGED
        assert 1 <= len(scene.recomputed) <= 8
        scene.injector.enabled = False
        assert scene.run().argmax(-1).tolist() == smol.expected(FILES).argmax(-1).tolist()
        scene.account()


@pytest.mark.faults
def test_host_memory_that_changed_is_read_again(smol: SavedModel, tmp_path: Path) -> None:
    """A bit flips in the host tier after its copy was verified. With a file behind it that costs one read."""
    with smol.scene(tmp_path / "store", HOST, once("readable", LAYER, Fault.CORRUPT), at="host") as scene:
        assert torch.equal(scene.run(), smol.expected(HOST))
        assert scene.faults == [("readable", "corrupt")]
        assert scene.memory.host is not None
        assert scene.memory.host.totals.damaged == 1
        assert (scene.recomputed, scene.store.usage().damaged) == ([], 0)
        scene.account()


@pytest.mark.faults
def test_host_memory_that_changed_and_has_no_file_is_computed_again(smol: SavedModel, tmp_path: Path) -> None:
    """The disk takes nothing, so that the host's copy is the authority, and then a bit of it flips."""
    injector = FaultInjector(FaultPlan())
    roomy = Setup("device+host, read-only", host=2 * SEGMENTS, slots=2 * LAYERS + 2 * CHUNKS)
    with smol.scene(tmp_path / "store", roomy, injector=injector, at="host", store={"read_only": True}) as scene:
        scene.request.close()
        # Another first token: no row of this prompt is stored.
        ids = smol.ids.clone()
        ids[0, 0] = ids[0, 1]
        injector.enabled = False
        scene.request = scene.memory.prefill(ids[0].tolist())
        with torch.no_grad():
            expected = smol.model(ids[:, -1:], past_key_values=scene.request.cache).logits[0, -1]
        scene.request.close()
        scene.request = scene.memory.prefill(ids[0].tolist())
        injector.plan, injector.enabled = once("readable", injector.calls.get("readable", 0), Fault.CORRUPT), True
        with torch.no_grad():
            found = smol.model(ids[:, -1:], past_key_values=scene.request.cache).logits[0, -1]
        assert scene.faults == [("readable", "corrupt")]
        assert torch.equal(found, expected)
        assert [reason for _, reason in scene.recomputed] == ["chunk_missing"]
        assert scene.memory.host is not None
        assert scene.memory.host.totals.damaged == 1
        scene.account()


@pytest.mark.faults
@BOTH
def test_another_chunk_under_the_name_is_foreign(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """vllm#12621: a short hash collided and foreign blocks were used. Whole identities are compared, not names."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, at="nowhere") as scene:
        mine, other = scene.digest(LAST), scene.digest(LAST - 1)
        scene.path(mine).write_bytes(scene.path(other).read_bytes())
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == [(LAST * CHUNK, "chunk_foreign")]
        assert scene.store.usage().damaged == 1
        scene.account()


@pytest.mark.faults
@BOTH
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: flip(path, 60), "chunk_damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "chunk_truncated"),
        (lambda path: path.write_bytes(b""), "chunk_truncated"),
        (Path.unlink, "chunk_missing"),
    ],
    ids=["header", "cut", "empty", "gone"],
)
def test_a_file_that_is_spoiled_at_rest_is_computed_again(
    smol: SavedModel, tmp_path: Path, setup: Setup, damage: object, reason: str
) -> None:
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, at="nowhere") as scene:
        damage(scene.path(scene.digest(LAST)))  # type: ignore[operator]
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == [(LAST * CHUNK, reason)]
        scene.memory.save("talk")
        assert all(verdict.sound for verdict in scene.store.verify())
        scene.account()
