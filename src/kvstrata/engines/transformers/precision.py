"""Which dtype a machine computes fastest without being asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstrata.engines.transformers.loading import DTYPES
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["AUTO", "DtypeChoice", "choose_dtype"]

AUTO = "auto"
_CPUINFO = Path("/proc/cpuinfo")
_NATIVE = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class DtypeChoice:
    """name: one of `DTYPES`. reason: why, for people."""

    name: str
    reason: str


def choose_dtype(wanted: str = AUTO, cpuinfo: Path = _CPUINFO) -> DtypeChoice:
    """`wanted` itself, or for `auto` bfloat16 where the CPU multiplies it natively, else float32.

    Without native instructions a bfloat16 matrix product is emulated, several times slower than float32.
    cpuinfo: the file with the CPU's flags. Errors: `ConfigurationError` for an unknown name.
    """
    if wanted in DTYPES:
        return DtypeChoice(wanted, "asked for")
    if wanted != AUTO:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"dtype is {wanted!r}", f"use {AUTO} or one of {', '.join(DTYPES)}"
        )
    flags = _flags(cpuinfo)
    found = [name for name in _NATIVE if name in flags]
    if found:
        return DtypeChoice("bfloat16", f"the CPU has {' and '.join(found)}")
    return DtypeChoice("float32", f"the CPU has none of {', '.join(_NATIVE)}, so bfloat16 would be emulated")


def _flags(cpuinfo: Path) -> set[str]:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()}
