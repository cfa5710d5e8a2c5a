"""The admission condition and the timing estimate, at the published figures of section 0x08I and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cost.credits import Credit, Credits, Demand, PathRate, charge, estimate, shortage
from kvstrata.errors import ConfigurationError, Reason

TOTAL, RESERVED = Credits(65536, 32768, 24576, 6), Credits(49152, 16384, 8192, 4)
ALPHA, BETA = Demand("U0", 4096, 4096), Demand("U0", 4096, 4096)
GAMMA, DELTA = Demand("U1", 8192, 8192), Demand("U2", 12288, 4096)
AMOUNTS = st.builds(Credits, *[st.integers(0, 50)] * 4)


def test_free_credits_of_the_published_example() -> None:
    assert Credits(16384, 16384, 16384, 2) == TOTAL - RESERVED


@pytest.mark.parametrize(
    ("admitted", "backend", "staging"),
    [([ALPHA, GAMMA], 12288, 12288), ([GAMMA, BETA], 12288, 12288), ([BETA, ALPHA], 4096, 8192)],
    ids=["fifo", "earliest deadline", "coalescing"],
)
def test_the_three_policies(admitted: list[Demand], backend: int, staging: int) -> None:
    """A shared unit is charged once; two destinations are two."""
    wanted = charge(admitted)
    assert wanted == Credits(backend, staging, backend, 2)
    assert shortage(TOTAL - RESERVED, wanted) is None
    assert shortage(TOTAL - RESERVED, charge([*admitted, DELTA])) is not None


@pytest.mark.parametrize(
    ("demand", "cross", "milliseconds"),
    [(ALPHA, False, 0.8), (GAMMA, False, 1.3), (BETA, True, 0.9), (DELTA, False, 1.8)],
)
def test_estimates_of_the_published_example(demand: Demand, cross: bool, milliseconds: float) -> None:
    rate = PathRate(setup_s=0.1e-3, bytes_per_s=8192e3, numa_s=0.1e-3)
    found = estimate(rate, demand.backend_bytes, 0.2e-3, cross_numa=cross)
    assert found == pytest.approx(milliseconds * 1e-3, rel=1e-12)


@pytest.mark.parametrize(
    ("wanted", "short"),
    [
        (Credits(11, 0, 0, 0), Credit.PINNED),
        (Credits(0, 11, 0, 0), Credit.STAGING),
        (Credits(0, 0, 11, 0), Credit.LINK),
        (Credits(0, 0, 0, 11), Credit.QUEUE),
        (Credits(10, 10, 10, 10), None),
    ],
)
def test_the_resource_that_is_short_is_named(wanted: Credits, short: Credit | None) -> None:
    assert shortage(Credits(10, 10, 10, 10), wanted) is short


@given(AMOUNTS, AMOUNTS)
def test_nothing_is_short_exactly_when_the_rest_is_not_negative(free: Credits, wanted: Credits) -> None:
    if shortage(free, wanted) is None:
        assert (free - wanted) + wanted == free
    else:
        with pytest.raises(ConfigurationError, match="negative"):
            _ = free - wanted


def test_one_unit_has_one_size() -> None:
    with pytest.raises(ConfigurationError, match="'U0' has 4096 bytes and 1 bytes"):
        charge([ALPHA, Demand("U0", 1, 4096)])


@pytest.mark.parametrize("values", [(0.0, 0.0, 0.0), (-1.0, 1.0, 0.0), (0.0, 1.0, -1.0), (0.0, float("nan"), 0.0)])
def test_a_path_without_a_rate(values: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        PathRate(*values)
    assert refusal.value.reason is Reason.INVALID_ARGUMENT
