"""The same seed injects the same faults, whatever else happens; the log says what was done."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan, Injection, Killed

ALL = frozenset(Fault)


@given(st.integers(0, 2**32))
def test_a_seed_decides(seed: int) -> None:
    plan = FaultPlan(seed, {Fault.CORRUPT: 0.3, Fault.LOSE: 0.3})
    one = [plan.fault("read", call) for call in range(50)]
    assert one == [FaultPlan(seed, {Fault.CORRUPT: 0.3, Fault.LOSE: 0.3}).fault("read", call) for call in range(50)]
    assert set(one) <= {None, Fault.CORRUPT, Fault.LOSE}


def test_rates_are_rates() -> None:
    plan = FaultPlan(1, {Fault.CORRUPT: 0.25, Fault.LOSE: 0.5})
    found = [plan.fault("read", call) for call in range(4000)]
    assert 900 < found.count(Fault.CORRUPT) < 1100
    assert 1900 < found.count(Fault.LOSE) < 2100


def test_operations_are_independent() -> None:
    """Calls of another operation in between change nothing."""
    plan = FaultPlan(5, {Fault.LOSE: 0.5})
    plain, mixed = FaultInjector(plan), FaultInjector(plan)
    first = [plain.next("read", ALL) for _ in range(20)]
    second = []
    for _ in range(20):
        mixed.next("write", ALL)
        second.append(mixed.next("read", ALL))
    assert first == second
    assert [each for each in mixed.log if each.operation == "read"] == plain.log


def test_explicit_faults_and_the_log() -> None:
    wish = Injection("write", 2, Fault.FILL_UP)
    injector = FaultInjector(FaultPlan(explicit=(wish,)))
    assert [injector.next("write", ALL) for _ in range(4)] == [None, None, Fault.FILL_UP, None]
    assert injector.log == [wish]
    assert injector.calls == {"write": 4}


def test_only_where_it_is_wanted_and_means_something() -> None:
    injector = FaultInjector(FaultPlan(0, {Fault.CORRUPT: 1.0}, operations=frozenset({"read"})))
    assert injector.next("write", ALL) is None
    assert injector.next("read", frozenset({Fault.LOSE})) is None
    assert injector.log == []
    assert injector.next("read", ALL) is Fault.CORRUPT
    injector.enabled = False
    assert injector.next("read", ALL) is None
    assert injector.calls == {"read": 2, "write": 1}


def test_delays_are_slept() -> None:
    slept: list[float] = []
    injector = FaultInjector(FaultPlan(0, {Fault.DELAY: 1.0}, delay_s=0.25), sleep=slept.append)
    assert injector.next("read", ALL) is None
    assert (slept, injector.log) == ([0.25], [Injection("read", 0, Fault.DELAY)])


def test_a_dead_process_does_nothing_more() -> None:
    injector = FaultInjector(FaultPlan(explicit=(Injection("read", 0, Fault.DIE),)))
    for _ in range(2):
        with pytest.raises(Killed):
            injector.next("read", ALL)
    injector.enabled = False
    with pytest.raises(Killed):
        injector.next("write", ALL)
    injector.revive()
    assert injector.next("write", ALL) is None


def test_a_death_of_the_callers_own() -> None:
    deaths: list[str] = []
    injector = FaultInjector(
        FaultPlan(explicit=(Injection("read", 0, Fault.DIE),)), die=lambda: deaths.append("os._exit")
    )
    with pytest.raises(Killed):
        injector.next("read", ALL)
    assert deaths == ["os._exit"]


def test_a_hang_lasts_until_it_is_let_go() -> None:
    injector = FaultInjector(FaultPlan(explicit=(Injection("read", 0, Fault.HANG),)))
    ended = threading.Event()

    def hang() -> None:
        injector.next("read", ALL)
        ended.set()

    thread = threading.Thread(target=hang)
    thread.start()
    while not injector.log:
        pass
    assert not ended.is_set()
    injector.let_go()
    thread.join()
    assert ended.is_set()


@pytest.mark.parametrize("rates", [{Fault.LOSE: -0.1}, {Fault.LOSE: 1.1}, {Fault.LOSE: 0.6, Fault.DIE: 0.6}])
def test_rates_that_are_no_probabilities(rates: dict[Fault, float]) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        FaultPlan(0, rates)
    assert refusal.value.reason is Reason.INVALID_ARGUMENT
