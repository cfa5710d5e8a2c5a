"""Generations, positions, tenants and leases that are not what they should be, while SmolLM2 generates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from engine_cases import CHUNK
from fault_runs import BOTH, CHUNKS, FILES, LAYERS, SETUPS, SavedModel, Setup

import kvstrata
from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.states import LeaseState, SlotState
from kvstrata.errors import Reason, SessionError, StateError, UnsupportedError
from kvstrata.store.leases import LeaseTable

LAST = CHUNKS - 1
LAYER = 7


@SETUPS
def test_a_chunk_of_a_corrupt_generation_is_not_read(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """The file's copy says another authority epoch than its record: it is fenced off, and its rows are computed."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup) as scene:
        record = scene.request.history.chunks[LAST]
        record.durable.epoch -= 1
        assert not record.valid(record.durable)
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == [(LAST * CHUNK, "chunk_missing")]
        again = scene.request.history.chunks[LAST]
        assert (again.digest, again.valid(again.durable)) == (record.digest, True)
        assert scene.memory.ledger().tokens_restored == LAST * CHUNK
        scene.account()


@SETUPS
def test_a_slot_of_a_corrupt_generation_is_not_read(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """A kernel never meets a table entry whose slot says another allocation generation."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup) as scene:
        arena, grant = scene.memory.arena, scene.request.history.tail[0].grants[LAYER]

        def corrupt() -> None:
            arena.generations[grant.slot] += 1
            arena.epoch += 1

        scene.at_layer(LAYER, corrupt)
        with pytest.raises(StateError, match=f"layer {LAYER} changed hands") as refusal:
            scene.run()
        assert refusal.value.reason is Reason.NOT_COMMITTED
        assert scene.request.frontier == smol.ids.shape[1] - 1
        arena.generations[grant.slot] -= 1
        arena.epoch += 1
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == []
        scene.account()


@SETUPS
def test_a_rope_position_that_is_left_out_is_refused(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """transformers#18104, kvpress#16. Positions are counted; the caller's must agree with every one of them."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup) as scene:
        first = scene.run(new=1)
        ledger, frontier = scene.memory.ledger(), scene.request.frontier
        token = first.argmax(-1)[None]
        with pytest.raises(UnsupportedError) as refusal, torch.no_grad():
            smol.model(token, past_key_values=scene.request.cache, position_ids=torch.tensor([[frontier + 1]]))
        assert refusal.value.reason is Reason.POSITIONS_UNSUPPORTED
        after = scene.memory.ledger()
        assert (after.tokens_computed, after.traffic) == (ledger.tokens_computed, ledger.traffic)
        assert scene.request.frontier == frontier
        with torch.no_grad():
            second = smol.model(token, past_key_values=scene.request.cache, position_ids=torch.tensor([[frontier]]))
        assert torch.equal(torch.cat([first, second.logits[0]]), expected[:2])
        scene.account()


@pytest.mark.faults
def test_a_token_that_is_left_out_moves_no_stored_row(smol: SavedModel, tmp_path: Path) -> None:
    """The rows after it belong to other positions: they are computed, not shifted."""
    left_out = LAST * CHUNK + 3
    ids = torch.cat([smol.ids[:, :left_out], smol.ids[:, left_out + 1 :]], dim=1)
    roomy = Setup("room for two open chunks", slots=FILES.slots + LAYERS)
    with smol.scene(tmp_path / "store", roomy) as scene:
        scene.request.close()
        cold = scene.memory.prefill(ids[0].tolist())
        with torch.no_grad():
            expected = smol.model(ids[:, -1:], past_key_values=cold.cache).logits[0, -1]
        cold.close()
        request, receipt = scene.memory.restore("talk", ids[0].tolist())
        assert (receipt.reason, receipt.restored_tokens) == (Reason.TOKENS_DIFFER, left_out)
        with torch.no_grad():
            found = smol.model(ids[:, request.frontier :], past_key_values=request.cache).logits[0, -1]
        assert found.argmax() == expected.argmax()
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
        assert request.token_ids == ids[0].tolist()
        scene.account()


@pytest.mark.faults
@BOTH
@pytest.mark.parametrize(("tenant", "salt"), [("other", ""), ("default", "salt")])
def test_no_tenant_or_salt_is_served_the_rows_of_another(
    smol: SavedModel, tmp_path: Path, setup: Setup, tenant: str, salt: str
) -> None:
    """LMCache#4825, sglang#37160. Not even when the file of one lies under the name of the other."""
    shutil.copytree(smol.folder / "saved", tmp_path / "store")
    options = setup.options(smol.model) | {"budget": None}
    prompt = smol.ids[0, : CHUNK + 5].tolist()
    with kvstrata.attach(smol.loaded, tmp_path / "store", tenant=tenant, salt=salt, **options) as memory:
        if tenant == "default":
            other, receipt = memory.restore("talk", prompt)
            assert (receipt.reason, receipt.restored_tokens) == (Reason.CONTEXT_DIFFERS, 0)
            other.close()
        else:
            with pytest.raises(SessionError) as refusal:
                memory.restore("talk", prompt)
            assert refusal.value.reason is Reason.SESSION_UNKNOWN
        request = memory.prefill(prompt)
        (record,) = request.history.chunks
        memory.save("mine", request)
        ledger = memory.ledger()
        assert ledger.traffic["file_writes"].resident_hit_bytes == 0
        assert ledger.tokens_restored == 0
        theirs = record.identity
        plain = kvstrata.attach(smol.loaded, memory.store, **options).context
        foreign = memory.store.file_tier.path(ChunkIdentity(plain, b"", 0, theirs.token_ids).digest)
        assert foreign.is_file()
        memory.store.file_tier.path(record.digest).write_bytes(foreign.read_bytes())
        request.close()
        again, receipt = memory.restore("mine", prompt)
        assert (receipt.reason, receipt.restored_tokens) == (Reason.CHUNK_FOREIGN, 0)
        again.close()
        assert memory.arena.used_slots == 0
        assert memory.store.usage().damaged == 1


@SETUPS
def test_a_lease_that_is_never_read_ends_and_gives_its_slots_back(
    smol: SavedModel, tmp_path: Path, setup: Setup
) -> None:
    """LMCache#1034: objects looked up and never retrieved stayed pinned for ever."""
    expected, now = smol.expected(setup), [0.0]
    roomy = Setup(setup.name, setup.host, setup.slots + LAYERS)
    with smol.scene(tmp_path / "store", roomy) as scene:
        arena, tail = scene.memory.arena, scene.request.history.tail[0]
        leases = LeaseTable(lambda: now[0])
        lease = leases.grant("somebody", "tail", [(arena, tail.grants[LAYER])], seconds=5, slot_owner=tail.owner)
        scene.request.close()
        assert (arena.used_slots, arena.state(tail.grants[LAYER].slot)) == (1, SlotState.RETIRED)
        scene.request, _ = scene.restore()
        assert torch.equal(scene.run(), expected)
        now[0] = 5.0
        assert leases.expire() == [lease]
        assert (lease.state, arena.owner(tail.grants[LAYER])) == (LeaseState.ACKNOWLEDGED, None)
        with pytest.raises(StateError) as refusal, leases.reading(lease):
            pass
        assert refusal.value.reason is Reason.LEASE_EXPIRED
        scene.account()


@pytest.mark.faults
def test_two_attachments_do_not_reserve_twice(smol: SavedModel, tmp_path: Path) -> None:
    """sglang#38156: several workers each reserved the whole pinned budget. Readers share one pool of credits."""
    with smol.scene(tmp_path / "store", readers=4) as scene:
        pool, arena = scene.promoter.pool, scene.memory.arena
        assert pool.total.pinned == arena.slots * arena.slot_bytes
        second = kvstrata.attach(smol.loaded, scene.store, **FILES.options(smol.model))
        with pytest.raises(StateError) as refusal:
            second.__enter__()
        assert refusal.value.reason is Reason.ALREADY_ATTACHED
        assert torch.equal(scene.run(), smol.expected(FILES))
        scene.account()
