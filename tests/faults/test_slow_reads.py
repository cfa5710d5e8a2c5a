"""Reads that take long, or never end, while SmolLM2 generates."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from fault_runs import BOTH, CHUNKS, HOST, LAYERS, SEGMENTS, SETUPS, SavedModel, Setup, once

from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan, Injection

LAYER = 7


@SETUPS
def test_a_copy_of_layer_7_that_is_late_changes_no_bit(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """The reads of a layer are in order: the first of layer 7 is held up for 20 ms in the first step."""
    expected, slept = smol.expected(setup), list[float]()
    plan = once("read", LAYER * CHUNKS, Fault.DELAY, delay_s=0.02)
    with smol.scene(tmp_path / "store", setup, injector=FaultInjector(plan, sleep=slept.append)) as scene:
        assert torch.equal(scene.run(), expected)
        assert slept == [0.02]
        assert scene.faults == [("read", "delay")]
        totals, ledger = scene.promoter.queue.totals, scene.memory.ledger()
        assert (totals.late, totals.stale, totals.failed) == (0, 0, 0)
        assert ledger.recomputes == ()
        assert ledger.tokens_restored == scene.restored.restored_tokens == smol.ids.shape[1] - 1
        scene.account()


@pytest.mark.faults
@BOTH
@pytest.mark.parametrize("readers", [1, 3])
def test_the_bits_are_the_same_at_any_load(smol: SavedModel, tmp_path: Path, setup: Setup, readers: int) -> None:
    """vllm#31210. Two requests share the memory, three calls in ten are held up, and the order of reads is chance."""
    expected = smol.expected(setup)
    plan = FaultPlan(seed=readers, rates={Fault.DELAY: 0.3}, delay_s=0.0005)
    roomy = Setup(setup.name, setup.host, setup.slots + LAYERS)
    with smol.scene(tmp_path / "store", roomy, plan, readers=readers) as scene:
        other, _ = scene.restore()
        found = [scene.run(request, new) for request, new in ((scene.request, 2), (other, 3))]
        assert torch.equal(found[0], expected[:2])
        assert torch.equal(found[1], expected)
        assert len(scene.injector.log) > 0
        totals = scene.promoter.queue.totals
        assert (totals.failed, totals.late) == (0, 0)
        assert scene.recomputed == []
        scene.account()


@SETUPS
def test_a_read_that_hangs_is_refused_at_the_deadline_and_the_request_goes_on(
    smol: SavedModel, tmp_path: Path, setup: Setup
) -> None:
    """vllm#54363: there was no deadline. Nothing is recomputed: the rows are still there."""
    expected = smol.expected(setup)
    plan = once("read", LAYER * CHUNKS, Fault.HANG)
    with smol.scene(tmp_path / "store", setup, plan) as scene:
        frontier = scene.request.frontier
        with scene.deadlines_pass(), pytest.raises(StoreError) as refusal:
            scene.run()
        assert refusal.value.reason is Reason.STORE_LATE
        assert scene.request.frontier == frontier
        assert scene.promoter.queue.totals.late >= 1
        held = [grant for waiter in scene.promoter.queue.book.waiters for grant in waiter.destination.grants]
        assert len(held) == CHUNKS, "the hung reader keeps its slots until it has acknowledged"
        scene.injector.let_go()
        scene.settle()
        assert scene.promoter.queue.totals.stale >= 1
        assert torch.equal(scene.run(), expected)
        assert (scene.recomputed, scene.store.usage().damaged) == ([], 0)
        scene.account()


@pytest.mark.faults
@BOTH
@pytest.mark.parametrize("operation", ["read", "open_chunk"])
def test_another_reader_goes_on_while_one_hangs_for_good(
    smol: SavedModel, tmp_path: Path, setup: Setup, operation: str
) -> None:
    """A tier that hangs in one call holds up one reader and its slots, not the memory, nor its end."""
    expected = smol.expected(setup)
    roomy = Setup(setup.name, setup.host, setup.slots + CHUNKS)
    with smol.scene(tmp_path / "store", roomy, once(operation, 0, Fault.HANG), readers=2) as scene:
        with scene.deadlines_pass(), pytest.raises(StoreError) as refusal:
            scene.run()
        assert refusal.value.reason is Reason.STORE_LATE
        assert torch.equal(scene.run(), expected)
        assert len(scene.promoter.queue.book.copying) == 1
        assert len(scene.promoter.pool.outstanding) > 0
        assert scene.recomputed == []
        scene.account()
        assert scene.promoter.queue.totals.stale >= 1


@pytest.mark.faults
def test_a_memory_ends_while_a_reader_hangs(smol: SavedModel, tmp_path: Path) -> None:
    """Closing waits no longer than the deadline, and the model is as it was."""
    with smol.scene(tmp_path / "store", plan=once("open_chunk", 0, Fault.HANG), read_timeout_s=0.2) as scene:
        with pytest.raises(StoreError) as refusal:
            scene.run()
        assert refusal.value.reason is Reason.STORE_LATE
        closer = threading.Thread(target=scene.memory.close)
        closer.start()
        closer.join(60)
        assert not closer.is_alive()
        promoter = scene.memory._promoter
        assert promoter is not None
        assert promoter.queue.book.copying != {}
        scene.injector.let_go()
        with promoter.queue.lock:
            assert promoter.queue.changed.wait_for(lambda: not promoter.queue.book.waiters, 30)
        assert promoter.pool.outstanding == ()
        assert scene.memory.arena.used_slots == 0


@pytest.mark.faults
@pytest.mark.parametrize("setup", [HOST, Setup("half a host", host=SEGMENTS // 2)], ids=lambda setup: setup.name)
def test_a_host_copy_that_is_slow_to_read_changes_no_bit(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    expected = smol.expected(setup)
    plan = FaultPlan(seed=3, rates={Fault.DELAY: 0.05}, operations=frozenset({"readable"}), delay_s=0.001)
    with smol.scene(tmp_path / "store", setup, plan, at="host") as scene:
        assert torch.equal(scene.run(), expected)
        assert set(scene.faults) == {("readable", "delay")}
        assert scene.memory.host is not None
        assert scene.memory.host.totals.hits > 0
        scene.account()


@pytest.mark.faults
def test_numerators_and_denominators_hold_under_faults(smol: SavedModel, tmp_path: Path) -> None:
    """vllm PR#30522, dynamo#4840. What was refused and read again is counted once in the ledger of steps."""
    plan = FaultPlan(explicit=(Injection("read", 4, Fault.DELAY), Injection("read", 90, Fault.LOSE)))
    with smol.scene(tmp_path / "store", HOST, plan) as scene:
        with pytest.raises(StoreError):
            scene.run()
        before = scene.memory.ledger().traffic
        assert torch.equal(scene.run(), smol.expected(HOST))
        after = scene.memory.ledger().traffic
        rows = sum(smol.ids.shape[1] + step for step in range(3))
        asked = rows * LAYERS * scene.memory.layout.row_bytes
        device, host, file = (
            [getattr(after[tier], name) - getattr(before[tier], name) for name in ("requested_bytes", "moved_bytes")]
            for tier in ("device", "host", "file")
        )
        assert device[0] == asked
        assert host[1] + file[1] == 3 * SEGMENTS * scene.memory.layout.segment_bytes
        assert file[0] == file[1]
        assert after["device"].resident_hit_bytes - before["device"].resident_hit_bytes == asked - host[1] - file[1]
        scene.account()
