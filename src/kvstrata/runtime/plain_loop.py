"""The step loop of somebody who runs one request at a time: a step that is postponed is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PlainLoop"]


class PlainLoop:
    """`StepLoop` that sleeps. sleep: takes seconds. Nobody else's steps run meanwhile; the load that left no exact path
    must end by itself."""

    def __init__(self, sleep: Callable[[float], object] = time.sleep) -> None:
        self._sleep = sleep

    def postpone(self, retry_window_ms: float) -> None:
        """Half of the window, so that what is decided then still lies within it."""
        self._sleep(retry_window_ms / 2000)
