"""The gate declines what is cheaper to compute again, says both costs, and never declines on too little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cost.service_rates import Direction, ServiceObservation, ServiceRate, ServiceRates
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.store.cost_gate import (
    CostBasis,
    CostGate,
    CostGateConfig,
    RestoreVerdict,
    StoreVerdict,
)
from kvstrata.store.service_ledger import ServiceLedger

MIB = 2**20


@dataclass
class Engine:
    """Computes a token in `per_token_s`."""

    per_token_s: float
    observations: int = 100

    def seconds(self, start: int, stop: int) -> float:
        return (stop - start) * self.per_token_s


def rates(read: float, write: float, fixed_s: float = 0.0, observations: int = 100) -> ServiceRates:
    """Rates of `files` in MiB/s."""
    return ServiceRates(
        {
            ("files", Direction.READ): ServiceRate(read * MIB, fixed_s, observations),
            ("files", Direction.WRITE): ServiceRate(write * MIB, fixed_s, observations),
        }
    )


def gate(measured: ServiceRates, per_token_s: float, observations: int = 100, **config: Any) -> CostGate:
    return CostGate(lambda: measured, Engine(per_token_s, observations), CostGateConfig(**config))


def test_quick_files_and_a_slow_model_store() -> None:
    """256 tokens of 40 ms each, half likely: 5.12 s against 0.05 s of reading and 0.2 s of writing 10 MiB."""
    decision = gate(rates(read=100, write=50), 0.04).store("files", 10 * MIB, 256, 512, reuse_probability=0.5)
    assert (decision.verdict, decision.basis, decision.reason) == (StoreVerdict.STORE, CostBasis.MEASURED, None)
    assert decision.terms is not None
    assert decision.terms.discard_cost_s == pytest.approx(5.12)
    assert decision.terms.keep_cost_s == pytest.approx(0.05 + 0.2)


def test_a_slow_disk_and_a_quick_model_decline_and_say_both_costs() -> None:
    decision = gate(rates(read=1, write=1), 0.01).store("files", 10 * MIB, 0, 256, reuse_probability=0.5)
    assert (decision.verdict, decision.basis) == (StoreVerdict.DECLINE, CostBasis.MEASURED)
    assert decision.reason is Reason.CHEAPER_TO_RECOMPUTE
    assert decision.terms is not None
    assert decision.terms.discard_cost_s == pytest.approx(1.28)
    assert decision.terms.keep_cost_s == pytest.approx(5.0 + 10.0)
    assert decision.detail == (
        "tokens [0, 256) in files: keeping costs 15000.000 ms, computing them again 1280.000 ms, "
        "at a probability of reuse of 0.5"
    )


def test_room_and_the_share_of_the_write_are_charged() -> None:
    """100 s of 1/1024 GiB at 10.24 s a GiB and second: 1 s. A tenth of a write of 1 s: 0.1 s."""
    decision = gate(rates(1e9, 1), 0.01, price_s_per_gib_s=10.24, held_s=100.0, write_share=0.1).store(
        "files", MIB, 0, 256, 1.0
    )
    assert decision.terms is not None
    assert decision.terms.capacity_s == pytest.approx(1.0)
    assert decision.terms.write_s == pytest.approx(0.1)


def test_what_is_never_used_again_is_declined() -> None:
    free = gate(rates(1, 1), 0.01, write_share=0.0)
    assert free.store("files", MIB, 0, 256, 0.0).verdict is StoreVerdict.DECLINE
    assert free.store("files", MIB, 0, 256, 0.01).verdict is StoreVerdict.STORE


@pytest.mark.parametrize(
    ("tier", "measured", "timed"), [("files", 7, 100), ("files", 100, 7), ("host", 100, 100), ("files", 0, 0)]
)
def test_too_few_observations_decline_nothing_and_say_so(tier: str, measured: int, timed: int) -> None:
    """The rates would decline: a second for a MiB against a nanosecond for a token."""
    unsure = gate(rates(1, 1, observations=measured), 1e-9, timed, least_observations=8)
    stored = unsure.store(tier, MIB, 0, 256, 0.0)
    assert (stored.verdict, stored.basis, stored.terms) == (StoreVerdict.STORE, CostBasis.UNMEASURED, None)
    assert "fewer than 8 observations" in stored.detail
    restored = unsure.restore(tier, MIB, 4, 0, 256)
    assert (restored.verdict, restored.basis, restored.reason) == (RestoreVerdict.RESTORE, CostBasis.UNMEASURED, None)


def test_one_observation_more_and_it_declines() -> None:
    ledger = ServiceLedger()
    judge = CostGate(ledger.rates, Engine(1e-9), CostGateConfig(least_observations=8))
    for _ in range(8):
        assert judge.store("files", MIB, 0, 256, 1.0).basis is CostBasis.UNMEASURED
        for direction in Direction:
            ledger.record(ServiceObservation("files", direction, MIB, 1.0))
    assert judge.store("files", MIB, 0, 256, 1.0).reason is Reason.CHEAPER_TO_RECOMPUTE


def test_every_so_many_declined_one_is_let_through() -> None:
    judge = gate(rates(1, 1), 1e-9, probe_every=3)
    stored = [judge.store("files", MIB, 0, 256, 1.0) for _ in range(6)]
    assert [one.verdict.value for one in stored] == ["decline", "decline", "store"] * 2
    assert [one.basis.value for one in stored] == ["measured", "measured", "probe"] * 2
    assert stored[2].reason is None
    restored = [judge.restore("files", MIB, 4, 0, 256) for _ in range(3)]
    assert [one.verdict.value for one in restored] == ["recompute", "recompute", "restore"]
    assert [one.basis.value for one in restored] == ["measured", "measured", "probe"]


def test_a_disk_that_was_slow_for_a_while_comes_back() -> None:
    ledger = ServiceLedger(window=16)
    judge = CostGate(ledger.rates, Engine(0.001), CostGateConfig(probe_every=4))

    def record(seconds: float) -> None:
        for direction in Direction:
            ledger.record(ServiceObservation("files", direction, MIB, seconds))

    for _ in range(16):
        record(60.0)
    verdicts = []
    for _ in range(60):
        decision = judge.store("files", MIB, 0, 256, 1.0)
        verdicts.append(decision.basis)
        if decision.verdict is StoreVerdict.STORE:
            record(0.01)
    assert verdicts[0] is CostBasis.MEASURED
    assert verdicts.count(CostBasis.PROBE) < 16
    assert judge.store("files", MIB, 0, 256, 1.0).verdict is StoreVerdict.STORE


def test_probes_can_be_turned_off() -> None:
    judge = gate(rates(1, 1), 1e-9, probe_every=0)
    assert {judge.store("files", MIB, 0, 256, 1.0).verdict for _ in range(100)} == {StoreVerdict.DECLINE}


@pytest.mark.parametrize(
    ("more_lookup_s", "restore_ms", "verdict", "reason"),
    [
        (0.0, 3.483125, RestoreVerdict.RESTORE, None),
        (0.012, 15.483125, RestoreVerdict.RECOMPUTE, Reason.CHEAPER_TO_RECOMPUTE),
    ],
)
def test_a_pause_is_restored_from_host_and_recomputed_rather_than_read_from_disk(
    more_lookup_s: float, restore_ms: float, verdict: RestoreVerdict, reason: Reason | None
) -> None:
    """3072 tokens in four layers of 12 MiB at 24 GiB/s + 0.1 ms, 1.8 ms of new tokens, 0.08 ms of looking up and 0.6 ms
    in the queue; computing everything takes 7.6 ms + 0.6 ms. The disk takes 12 ms more before its first byte.
    """
    measured = rates(read=24 * 1024, write=1, fixed_s=0.0001)
    judge = gate(measured, 0.0058 / 3072)
    decision = judge.restore(
        "files", 48 * MIB, 4, 0, 3072, lookup_s=0.00008 + more_lookup_s, queue_s=0.0006, suffix_s=0.0018
    )
    assert decision.restore_s * 1000 == pytest.approx(restore_ms)
    assert decision.recompute_s * 1000 == pytest.approx(8.2)
    assert (decision.verdict, decision.basis, decision.reason) == (verdict, CostBasis.MEASURED, reason)
    assert f"{restore_ms:.3f} ms, computed again: 8.200 ms" in decision.detail


def test_a_tie_is_read() -> None:
    judge = gate(rates(read=1, write=1), 1 / 256)
    assert judge.restore("files", MIB, 1, 0, 256).verdict is RestoreVerdict.RESTORE
    assert judge.restore("files", MIB + 1, 1, 0, 256).verdict is RestoreVerdict.RECOMPUTE


@given(st.floats(0, 1), st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(1e-7, 1.0), st.integers(1, 4096))
def test_it_stores_exactly_what_has_a_value(
    probability: float, read: float, write: float, per_token_s: float, tokens: int
) -> None:
    nbytes = tokens * 1000
    decision = gate(rates(read, write), per_token_s).store("files", nbytes, 0, tokens, probability)
    mib = nbytes / MIB
    value = probability * (tokens * per_token_s - mib / read) - mib / write
    if abs(value) > 1e-9:
        assert (decision.verdict is StoreVerdict.STORE) == (value > 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("least_observations", 0),
        ("held_s", -1.0),
        ("price_s_per_gib_s", float("nan")),
        ("write_share", -0.5),
        ("probe_every", -1),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"CostGateConfig\.{field}={value} "):
        CostGateConfig(**{field: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nbytes": 0}, "nbytes=0"),
        ({"start": -1}, "start=-1"),
        ({"stop": 0}, "stop=0"),
        ({"reuse_probability": 1.5}, r"reuse_probability=1\.5"),
    ],
)
def test_a_question_that_cannot_be_is_refused(change: dict[str, Any], named: str) -> None:
    sound: dict[str, Any] = {"tier": "files", "nbytes": 1, "start": 0, "stop": 1, "reuse_probability": 0.5}
    with pytest.raises(ConfigurationError, match=named):
        gate(rates(1, 1), 1.0).store(**{**sound, **change})


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("lookup_s", -1.0), ("queue_s", -1.0), ("suffix_s", -1.0)])
def test_a_restore_that_cannot_be_is_refused(field: str, value: float) -> None:
    sound: dict[str, Any] = {"tier": "files", "nbytes": 1, "layers": 1, "start": 0, "stop": 1}
    with pytest.raises(ConfigurationError, match=f"{field}={value} "):
        gate(rates(1, 1), 1.0).restore(**{**sound, field: value})
