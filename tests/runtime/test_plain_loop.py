"""A plain wait: half of the window, and nothing else."""

from __future__ import annotations

import pytest

from kvstrata.ports import StepLoop
from kvstrata.runtime.plain_loop import PlainLoop


@pytest.mark.parametrize(("window_ms", "seconds"), [(0.0, 0.0), (8.0, 0.004), (2500.0, 1.25)])
def test_it_sleeps_for_half_of_the_window(window_ms: float, seconds: float) -> None:
    slept: list[float] = []
    loop: StepLoop = PlainLoop(slept.append)
    loop.postpone(window_ms)
    assert slept == [seconds]


def test_what_interrupts_the_sleep_reaches_the_caller() -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PlainLoop(interrupted).postpone(5.0)


def test_it_sleeps_by_itself() -> None:
    PlainLoop().postpone(0.01)
