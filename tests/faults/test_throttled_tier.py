"""The durable tier behind a slow link of declared rate and latency, while SmolLM2 generates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_cases import CHUNK
from fault_runs import BOTH, CHUNKS, FILES, HOST, LAYERS, SEGMENTS, SETUPS, SavedModel, Setup, once

from kvstrata.cost.service_rates import Direction, ServiceObservation
from kvstrata.errors import Reason, StoreError
from kvstrata.store.cost_gate import CostGate, RestoreVerdict, StoreVerdict
from kvstrata.store.service_ledger import ServiceLedger
from kvstrata.tiers.fault_plan import Fault, FaultInjector
from kvstrata.tiers.faulty import FaultyTier
from kvstrata.tiers.files import FileTier
from kvstrata.tiers.throttled import Link, ThrottledTier

RATE, LATENCY = 50e6, 0.002


def behind(link: Link) -> Callable[[FileTier], ThrottledTier]:
    return lambda tier: ThrottledTier(tier, link)


@SETUPS
def test_a_slow_link_changes_the_time_and_no_bit(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """What the link says passed is what the ledger says was read, plus what was read ahead and not used."""
    expected, slept = smol.expected(setup), list[float]()
    link = Link(RATE, LATENCY, sleep=slept.append)
    with smol.scene(tmp_path / "store", setup, store={"wrap_tier": behind(link)}) as scene:
        assert scene.promoter.queue.direction == "link -> device"
        before = link.totals.bytes
        assert torch.equal(scene.run(), expected)
        passed, ledger = link.totals.bytes - before, scene.memory.ledger()
        segment = scene.memory.layout.segment_bytes
        ahead = passed - ledger.traffic["file"].moved_bytes
        assert 0 <= ahead <= 2 * CHUNKS * segment
        assert link.totals.busy_s == pytest.approx(link.totals.bytes / RATE)
        assert link.totals.waited_s == pytest.approx(sum(slept))
        assert max(slept) > LATENCY
        if setup.host:
            assert passed == SEGMENTS * segment, "each segment crosses the link once"
        assert scene.recomputed == []
        scene.account()


@SETUPS
def test_a_link_that_stops_is_refused_at_the_deadline(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    expected, going = smol.expected(setup), threading.Event()
    going.set()
    link = Link(RATE, LATENCY, sleep=lambda _: going.wait(30) and None)  # type: ignore[func-returns-value]
    with smol.scene(tmp_path / "store", setup, store={"wrap_tier": behind(link)}) as scene:
        going.clear()
        with scene.deadlines_pass(lambda: True), pytest.raises(StoreError) as refusal:
            scene.run()
        assert refusal.value.reason is Reason.STORE_LATE
        assert "read_timeout_s" in refusal.value.next_step
        going.set()
        scene.settle()
        assert scene.promoter.queue.totals.late >= 1
        assert torch.equal(scene.run(), expected)
        assert (scene.recomputed, scene.store.usage().damaged) == ([], 0)
        scene.account()


@pytest.mark.faults
@BOTH
def test_faults_behind_a_slow_link_keep_their_outcomes(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """A read that is dropped beyond the link is refused; a chunk that is damaged there is computed."""
    expected = smol.expected(setup)
    link = Link(RATE, LATENCY, sleep=lambda _: None)
    injector = FaultInjector(once("read", 3, Fault.LOSE))
    wrap = {"wrap_tier": lambda tier: ThrottledTier(FaultyTier(tier, injector), link)}
    with smol.scene(tmp_path / "store", setup, injector=injector, store=wrap) as scene:
        with pytest.raises(StoreError) as refusal:
            scene.run()
        assert refusal.value.reason is Reason.STORE_IO
        injector.plan = once("read", injector.calls["read"] + CHUNKS - 1, Fault.CORRUPT)
        assert torch.equal(scene.run(), expected)
        assert [reason for _, reason in scene.recomputed] == ["chunk_damaged"]
        assert scene.store.usage().damaged == 1
        scene.account()


@dataclass
class _Prefill:
    """Computing tokens takes what SmolLM2 took for the whole prompt."""

    per_token_s: float
    observations: int = 8

    def seconds(self, start: int, stop: int) -> float:
        return (stop - start) * self.per_token_s


@pytest.mark.faults
@pytest.mark.parametrize("setup", [FILES, HOST], ids=lambda setup: setup.name)
def test_a_link_slower_than_the_model_is_declined(smol: SavedModel, tmp_path: Path, setup: Setup) -> None:
    """LMCache#970, #1241: offload made things slower than recomputing. The link's own numbers decide, and are said."""
    slept = list[float]()
    link = Link(2e6, 0.05, sleep=slept.append)
    with smol.scene(tmp_path / "store", setup, store={"wrap_tier": behind(link)}) as scene:
        ledger, layer = ServiceLedger(), scene.memory.layout.segment_bytes
        assert torch.equal(scene.run(new=1), smol.expected(setup)[:1])
        assert link.totals.bytes >= SEGMENTS * layer
        for count in range(1, 9):
            for direction in Direction:
                ledger.record(
                    ServiceObservation("link", direction, count * layer, link.latency_s + count * layer / 2e6)
                )
        chunk = LAYERS * layer
        quick = CostGate(ledger.rates, _Prefill(0.002))
        store = quick.store("link", chunk, 0, CHUNK, reuse_probability=1.0)
        restore = quick.restore("link", chunk, LAYERS, 0, CHUNK)
        assert (store.verdict, store.reason) == (StoreVerdict.DECLINE, Reason.CHEAPER_TO_RECOMPUTE)
        assert (restore.verdict, restore.reason) == (RestoreVerdict.RECOMPUTE, Reason.CHEAPER_TO_RECOMPUTE)
        assert restore.recompute_s < restore.restore_s
        slow = CostGate(ledger.rates, _Prefill(0.2))
        assert slow.store("link", chunk, 0, CHUNK, reuse_probability=1.0).verdict is StoreVerdict.STORE
        scene.account()
