"""Resident memory of this process, as the kernel counts it. Linux; elsewhere sizes are `None`."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

__all__ = ["peak_resident_bytes", "release_free_memory", "reset_peak", "resident_bytes"]

_PROC = Path("/proc/self")


def resident_bytes() -> int | None:
    """Bytes of this process in memory now (VmRSS)."""
    return _status("VmRSS")


def peak_resident_bytes() -> int | None:
    """Most bytes in memory since the start or the last `reset_peak` (VmHWM)."""
    return _status("VmHWM")


def release_free_memory() -> None:
    """Collect garbage and give freed heap back to the system, so that a later growth is not hidden in it."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return  # not glibc


def reset_peak() -> bool:
    """Let `peak_resident_bytes` start again from what is in memory now; False where the kernel does not permit it."""
    try:
        (_PROC / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status(field: str) -> int | None:
    try:
        lines = (_PROC / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith(field + ":")), None)
    return int(found[1]) * 1024 if found else None
