"""More is asked for than may be on its way, while SmolLM2 generates."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from engine_cases import CHUNK
from fault_runs import CHUNKS, FILES, SETUPS, SavedModel, Setup, once

from kvstrata.cost.credits import Credits
from kvstrata.engines.transformers.context import segment_layout
from kvstrata.engines.transformers.parts import MemoryParts
from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.fault_plan import Fault


@SETUPS
@pytest.mark.parametrize("resource", ["staging", pytest.param("queue", marks=pytest.mark.faults)])
def test_full_staging_is_a_refusal_and_never_a_spin(
    smol: SavedModel, tmp_path: Path, setup: Setup, resource: str
) -> None:
    """LMCache#2942: a full staging buffer made a request spin without end. A hung read keeps its credits: what does not
    fit beside it waits until its deadline, is refused then, and goes through when the read has been acknowledged."""
    expected = smol.expected(setup)
    one = CHUNKS * segment_layout(smol.model, CHUNK).segment_bytes
    pool = Credits(9 * one, one, 9 * one, 9) if resource == "staging" else Credits(9 * one, 9 * one, 9 * one, 1)
    reason = Reason.CREDIT_PRESSURE if resource == "staging" else Reason.QUEUE_FULL
    with smol.scene(
        tmp_path / "store",
        Setup(setup.name, setup.host, setup.slots + CHUNKS),
        once("read", 0, Fault.HANG),
        readers=1,
        parts=MemoryParts(credits=pool),
    ) as scene:
        with scene.deadlines_pass(), pytest.raises(StoreError) as refusal:
            scene.run()
        assert refusal.value.reason is Reason.STORE_LATE
        assert len(scene.promoter.pool.outstanding) == 2, "the read's, and its destination's"
        totals = scene.promoter.queue.totals
        assert (totals.waited, totals.refused) == (0, 0)
        with (
            scene.deadlines_pass(lambda: scene.promoter.queue.totals.waited == 1),
            pytest.raises(StoreError) as refusal,
        ):
            scene.run()
        assert refusal.value.reason is reason
        totals = scene.promoter.queue.totals
        assert (totals.waited, totals.refused) == (1, 1)
        assert totals.waited_s >= 30
        assert scene.request.frontier == smol.ids.shape[1] - 1
        scene.injector.let_go()
        scene.settle()
        assert torch.equal(scene.run(), expected)
        assert scene.recomputed == []
        scene.account()


@SETUPS
def test_a_layer_that_lacks_credits_goes_on_when_they_come_back(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """The hung read is acknowledged while the next step waits for its credits: no refusal, and no bit differs."""
    one = CHUNKS * segment_layout(smol.model, CHUNK).segment_bytes
    with smol.scene(
        tmp_path / "store",
        Setup(setup.name, setup.host, setup.slots + CHUNKS),
        once("read", 0, Fault.HANG),
        readers=1,
        parts=MemoryParts(credits=Credits(one, one, one, 1)),
    ) as scene:
        with scene.deadlines_pass(), pytest.raises(StoreError):
            scene.run()

        def let_go() -> None:
            scene.until(lambda: scene.promoter.queue.totals.waited == 1)
            scene.injector.let_go()

        helper = threading.Thread(target=let_go)
        helper.start()
        assert torch.equal(scene.run(), smol.expected(setup))
        helper.join()
        assert scene.promoter.queue.totals.refused == 0
        assert scene.recomputed == []
        scene.account()


@pytest.mark.faults
def test_a_forgotten_request_pins_nothing_that_others_need(smol: SavedModel, tmp_path: Path) -> None:
    """LMCache#1034, as a request that was restored and never continued."""
    roomy = Setup(FILES.name, slots=FILES.slots + CHUNKS * 30)
    with smol.scene(tmp_path / "store", roomy) as scene:
        forgotten = scene.request
        scene.request, _ = scene.restore()
        assert torch.equal(scene.run(), smol.expected(FILES))
        assert not forgotten.closed
        assert scene.memory.arena.peak_slots <= roomy.slots
        scene.account()
