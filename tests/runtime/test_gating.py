"""Chunks are declined, and sessions computed again, only on measurements that say so."""

from __future__ import annotations

import pytest
from chunks_and_faults import LAYERS, LAYOUT
from directory_parts import make_directory, make_history

from kvstrata.cost.service_rates import Direction, ServiceObservation
from kvstrata.errors import Reason
from kvstrata.runtime.gating import Gating, PrefillTimes
from kvstrata.store.cost_gate import CostBasis, CostGateConfig, RestoreVerdict, StoreVerdict
from kvstrata.store.service_ledger import ServiceLedger

CONFIG = CostGateConfig(least_observations=4, probe_every=0)
NBYTES = LAYERS * LAYOUT.segment_bytes


def make_gating(byte_s: float, row_s: float, seen: int = 4) -> Gating:
    """A tier of `byte_s` seconds a byte either way, and a model of `row_s` seconds a row."""
    rates, times = ServiceLedger(), PrefillTimes()
    for count in range(1, seen + 1):
        for direction in Direction:
            rates.record(ServiceObservation("files", direction, count * NBYTES, count * NBYTES * byte_s))
        times.record(count * 100, 64, 64 * row_s)
    return Gating(rates, times, LAYOUT, LAYERS, "files", CONFIG)


def test_a_fast_tier_takes_chunks_and_a_slow_one_does_not() -> None:
    record = make_history(make_directory(), 1).chunks[0]
    fast, slow = make_gating(1e-9, 1e-3), make_gating(1e-4, 1e-6)
    assert fast.admits(record)
    assert not slow.admits(record)
    assert slow.latest is not None
    assert (slow.latest.verdict, slow.latest.reason) == (StoreVerdict.DECLINE, Reason.CHEAPER_TO_RECOMPUTE)
    assert (fast.declined_bytes, slow.declined_bytes) == (0, NBYTES)


def test_nothing_is_declined_before_it_was_measured() -> None:
    record = make_history(make_directory(), 1).chunks[0]
    gating = make_gating(1e-4, 1e-6, seen=3)
    assert gating.admits(record)
    assert gating.latest is not None
    assert gating.latest.basis is CostBasis.UNMEASURED
    assert gating.restore(100).verdict is RestoreVerdict.RESTORE


def test_a_session_is_read_or_computed_by_what_is_sooner() -> None:
    assert make_gating(1e-9, 1e-3).restore(256).verdict is RestoreVerdict.RESTORE
    decision = make_gating(1e-4, 1e-6).restore(256)
    assert (decision.verdict, decision.reason) == (RestoreVerdict.RECOMPUTE, Reason.CHEAPER_TO_RECOMPUTE)
    assert decision.recompute_s == pytest.approx(256e-6)
    assert decision.restore_s > decision.recompute_s


def test_rows_cost_more_the_further_they_look_back() -> None:
    times = PrefillTimes()
    assert (times.observations, times.seconds(0, 100)) == (0, 0.0)
    for start in range(0, 1000, 100):
        times.record(start, 100, 100 * (2e-3 + 1e-6 * (start + 50)))
    times.record(1000, 15, 1.0)
    times.record(1000, 100, 0.0)
    assert times.observations == 10
    assert times.seconds(0, 100) == pytest.approx(100 * (2e-3 + 50e-6))
    assert times.seconds(2000, 2100) == pytest.approx(100 * (2e-3 + 2050e-6))


def test_times_that_fall_with_the_position_are_noise() -> None:
    times = PrefillTimes()
    for start, cost in ((0, 3e-3), (100, 2e-3), (200, 1e-3)):
        times.record(start, 100, 100 * cost)
    assert times.seconds(5000, 5100) == pytest.approx(100 * 2e-3)
