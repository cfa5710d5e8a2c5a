"""Reads that are acknowledged when nobody wants them, twice, out of order, or into slots that changed hands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fault_runs import BOTH, CHUNKS, FILES, HOST, SETUPS, SavedModel, Scene, Setup, once

from kvstrata.contract.states import SlotState
from kvstrata.engines.transformers.parts import MemoryParts
from kvstrata.errors import Reason, StateError, StoreError
from kvstrata.store.promotion import Batch
from kvstrata.tiers.fault_plan import Fault, FaultInjector
from kvstrata.tiers.faulty import FaultyDelivery
from kvstrata.tiers.memory import Grant

LAYER = 7


class CancelledError(Exception):
    """What ends a call of `generate` from outside."""


def cancel_at_layer(scene: Scene, layer: int) -> None:
    """Once the fault has been met: what has not begun needs no acknowledgement."""

    def cancel() -> None:
        scene.until(lambda: bool(scene.injector.log))
        raise CancelledError

    scene.at_layer(layer, cancel)
    with scene.deadlines_pass(), pytest.raises(CancelledError):
        scene.run()


def slots_of(scene: Scene) -> list[Grant]:
    """Slots into which readers may still write."""
    return [grant for waiter in scene.promoter.queue.book.waiters for grant in waiter.destination.grants]


@SETUPS
def test_a_copy_that_completes_after_the_request_was_cancelled(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """vllm PR#32255: an aborted load freed its blocks early, or never. Here: once, after the acknowledgement."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, once("read", LAYER * CHUNKS, Fault.HANG)) as scene:
        cancel_at_layer(scene, LAYER - 1)
        scene.request.close()
        late, queue = slots_of(scene), scene.promoter.queue
        assert len(late) == CHUNKS
        assert scene.memory.arena.used_slots == CHUNKS
        assert [scene.memory.arena.state(grant.slot) for grant in late] == [SlotState.RESERVED] * CHUNKS
        assert scene.promoter.pool.reserved.staging == CHUNKS * scene.memory.arena.slot_bytes
        scene.injector.let_go()
        scene.settle()
        assert scene.memory.arena.used_slots == 0
        assert queue.totals.stale == 1
        assert queue.totals.cancelled + queue.totals.late == 2, "layers 6 and 7 were on their way"
        scene.request, _ = scene.restore()
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == []
        scene.account()


@SETUPS
def test_no_slot_is_reused_before_the_old_callback(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """sglang PR#36738. While the old read hangs, another request generates: in other slots, and with the right bits."""
    expected = smol.expected(setup)
    roomy = Setup(setup.name, setup.host, setup.slots + CHUNKS)
    plan = once("read", LAYER * CHUNKS, Fault.HANG)
    with smol.scene(tmp_path / "store", roomy, plan, readers=2) as scene:
        cancel_at_layer(scene, LAYER - 1)
        scene.request.close()
        late, arena = slots_of(scene), scene.memory.arena
        assert late
        owners = [arena.owner(grant) for grant in late]
        scene.request, _ = scene.restore()
        assert torch.equal(scene.run(), expected)
        assert [arena.owner(grant) for grant in late] == owners
        taken = {grant.slot for record in scene.memory.directory for grant in record.grants if grant is not None}
        taken |= {grant.slot for grant in scene.request.history.grants}
        assert not taken & {grant.slot for grant in late}
        scene.injector.let_go()
        scene.settle()
        assert scene.promoter.queue.totals.stale == 1
        assert all(arena.owner(grant) is None for grant in late)
        scene.account()


@SETUPS
def test_a_slot_given_away_before_the_old_callback_is_never_published(
    smol: SavedModel, tmp_path: Path, setup: Setup
) -> None:
    """Somebody breaks the rule and reuses the slot of a read under way (ABA): its rows are refused, and read again."""
    expected = smol.expected(setup)
    with smol.scene(tmp_path / "store", setup, once("read", LAYER * CHUNKS, Fault.HANG), readers=2) as scene:
        arena, stolen = scene.memory.arena, list[Grant]()

        def give_away() -> None:
            batch = scene.request.plan._staged[LAYER]
            assert isinstance(batch, Batch)
            grant = batch.items[0].grant
            arena.release(grant)
            other = arena.reserve("somebody else")
            assert other is not None
            assert (other.slot, other.generation > grant.generation) == (grant.slot, True)
            stolen.append(other)
            scene.injector.let_go()

        scene.at_layer(LAYER, give_away)
        with pytest.raises(StateError, match="recycled_destination") as refusal:
            scene.run()
        assert refusal.value.reason is Reason.NOT_COMMITTED
        scene.settle()
        assert scene.promoter.queue.totals.failed >= 1
        assert scene.request.history.chunks[0].grants[LAYER] is None
        assert arena.owner(stolen[0]) is None, "the memory knows no such owner, and takes the slot back"
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == []
        scene.account()


@pytest.mark.faults
@BOTH
@pytest.mark.parametrize("fault", [Fault.DUPLICATE, Fault.REORDER])
def test_acknowledgements_that_come_twice_or_out_of_order(
    smol: SavedModel, tmp_path: Path, setup: Setup, fault: Fault
) -> None:
    """Told apart by their transfer's generation; what was acknowledged before changes nothing."""
    expected = smol.expected(setup)
    injector = FaultInjector(once("acknowledge", LAYER, fault))
    parts = MemoryParts(deliver=FaultyDelivery(injector))
    with smol.scene(tmp_path / "store", setup, injector=injector, at="delivery", parts=parts) as scene:
        assert torch.equal(scene.run(), expected)
        assert scene.faults == [("acknowledge", fault.value)]
        totals = scene.promoter.queue.totals
        assert totals.duplicates == (fault is Fault.DUPLICATE)
        assert (totals.stale, totals.late, scene.recomputed) == (0, 0, [])
        scene.account()


@SETUPS
def test_an_acknowledgement_that_never_comes_is_a_deadline(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """Its slots and credits stay out until it does come, and are given back then: LMCache#2942, no endless wait."""
    expected = smol.expected(setup)
    injector = FaultInjector(once("acknowledge", LAYER, Fault.LOSE))
    delivery = FaultyDelivery(injector)
    roomy = Setup(setup.name, setup.host, setup.slots + CHUNKS)
    with smol.scene(
        tmp_path / "store",
        roomy,
        injector=injector,
        at="delivery",
        parts=MemoryParts(deliver=delivery),
    ) as scene:
        with scene.deadlines_pass(), pytest.raises(StoreError) as refusal:
            scene.run()
        assert refusal.value.reason is Reason.STORE_LATE
        late, arena = slots_of(scene), scene.memory.arena
        assert len(late) == CHUNKS
        assert torch.equal(scene.run(), expected)
        assert all(arena.state(grant.slot) is SlotState.RESERVED for grant in late)
        assert delivery.flush() == 1
        assert scene.promoter.queue.totals.stale == 1
        assert all(arena.owner(grant) is None for grant in late)
        assert scene.recomputed == []
        scene.account()


@pytest.mark.faults
def test_a_host_copy_is_not_reused_while_a_transfer_reads_it(smol: SavedModel, tmp_path: Path) -> None:
    """sglang PR#28468: a host copy was evicted while a transfer read it."""
    with smol.scene(tmp_path / "store", HOST, once("readable", 0, Fault.HANG), at="host") as scene:
        host, directory = scene.memory.directory.host, scene.memory.directory
        assert host is not None
        seen = list[tuple[SlotState, bytes, bytes]]()

        def displace() -> None:
            record = scene.request.history.chunks[0]
            grant = record.host.grants[0]
            assert grant is not None
            before = bytes(host.backing.backing.readable(grant.slot))  # type: ignore[attr-defined]
            directory.evict_host(record, 0)
            taken = [each for each in iter(lambda: host.reserve("another"), None) if each is not None]
            assert grant.slot not in {each.slot for each in taken}
            for each in taken:
                host.release(each)
            seen.append((host.state(grant.slot), before, bytes(host.backing.backing.readable(grant.slot))))  # type: ignore[attr-defined]
            scene.injector.let_go()

        first = scene.run(new=1)
        scene.at_layer(0, displace)
        ids = torch.cat([smol.ids, first.argmax(-1)[None]], dim=1)
        with torch.no_grad():
            second = smol.model(ids[:, -1:], past_key_values=scene.request.cache).logits[0]
        assert torch.equal(torch.cat([first, second]), smol.expected(FILES)[:2])
        ((state, before, after),) = seen
        assert state is SlotState.RETIRED
        assert before == after
        assert scene.faults == [("readable", "hang")]
        assert scene.memory.host is not None
        assert scene.memory.host.totals.damaged == 0
        scene.account()
