"""What the lower floors need from the outside, as protocols."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Clock"]


class Clock(Protocol):
    """Seconds from an arbitrary origin that never go back, e.g. `time.perf_counter`."""

    def __call__(self) -> float: ...
