"""Finds, checks and loads the native kernels through ctypes.

One shared object per instruction-set level lies in ``_native/``; the best one that this CPU runs is chosen at run time.
``KVSTRATA_ISA`` (``portable``, ``avx2``, ``avx512`` or ``torch``) names one instead. Nothing is loaded on import.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Mapping
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, KernelUnavailable, KvstrataError, Reason

__all__ = ["ENVIRONMENT", "KernelReport", "NativeKernels", "NativeLayout", "available_levels", "describe", "load"]

ENVIRONMENT = "KVSTRATA_ISA"
"""Environment variable that names a level, or ``torch`` for no native code."""

ABI_VERSION = 2
TORCH = "torch"
_CPU_BITS = {"portable": 1, "avx2": 2, "avx512": 4}
LEVELS = tuple(_CPU_BITS)
_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


class NativeLayout(ctypes.Structure):
    """The C side of `SegmentLayout`."""

    _fields_ = (
        ("dtype", c_int32),
        ("kv_heads", c_int32),
        ("query_heads", c_int32),
        ("head_dim", c_int32),
        ("page_tokens", c_int32),
        ("chunk_tokens", c_int32),
    )

    @classmethod
    def of(cls, layout: SegmentLayout) -> NativeLayout:
        """The same geometry as a C struct."""
        return cls(
            _DTYPES[layout.dtype],
            layout.kv_heads,
            layout.query_heads,
            layout.head_dim,
            layout.page_tokens,
            layout.chunk_tokens,
        )


@dataclass(frozen=True)
class KernelReport:
    """Which kernels this machine has.

    Attributes:
        level: level in use, or ``torch``.
        available: levels built here that this CPU runs, slowest first.
        unavailable: level to the reason why it is not available.
        forced: the value of ``KVSTRATA_ISA``, or the empty string.
    """

    level: str
    available: tuple[str, ...]
    unavailable: Mapping[str, str]
    forced: str


class NativeKernels:
    """The functions of one level, as declared in ``native/kvstrata.h``.

    Attributes `attend`, `append`, `append_and_attend`, `gather` and `merge` take addresses as ints, block until done
    with the interpreter lock released, and return a status for `check`.
    """

    def __init__(self, level: str, path: Path) -> None:
        self.level = level
        self.path = path
        library = ctypes.CDLL(str(path))
        pointer, size = c_void_p, c_int64
        paged = (pointer, size)
        rows = (pointer, size, size)
        self.attend = _bind(
            library, "kvs_attend", pointer, pointer, *paged, size, size, pointer, c_float, *[pointer] * 5
        )
        self.append = _bind(library, "kvs_append", pointer, *paged, size, size, *rows, *rows)
        self.append_and_attend = _bind(
            library, "kvs_append_and_attend",
            pointer, pointer, *paged, size, size, pointer, size, pointer, size, pointer, c_float, pointer, pointer,
        )  # fmt: skip
        self.gather = _bind(
            library, "kvs_gather", pointer, pointer, *paged, size, size, pointer, pointer, size, c_int32
        )
        self.merge = _bind(library, "kvs_merge", size, size, *[pointer] * 9)
        self._create = library.kvs_pool_create
        self._create.argtypes, self._create.restype = (c_int32,), c_void_p
        self._destroy = library.kvs_pool_destroy
        self._destroy.argtypes, self._destroy.restype = (c_void_p,), None

    def create_pool(self, threads: int, owner: object) -> int:
        """Address of a pool of `threads` threads (the caller counted), destroyed when `owner` is collected.

        Returns 0, the pool that runs everything on the calling thread, for one thread.
        """
        if threads < 2:
            return 0
        pool: int | None = self._create(threads)
        if pool is None:
            raise MemoryError(f"no memory for a pool of {threads} threads")
        weakref.finalize(owner, self._destroy, pool)
        return pool

    @staticmethod
    def check(status: int) -> None:
        """Raises for a status other than 0. Callers validate first, so a bad one is their bug."""
        if status == 0:
            return
        if status == 4:
            raise MemoryError("no memory for the kernel's partial states")
        what = {1: "layout out of range", 2: "tokens beyond the block table", 3: "missing address"}
        raise KvstrataError(Reason.INVALID_ARGUMENT, f"native kernel refused its arguments: {what.get(status, status)}")


def _bind(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, c_int32
    bound: Callable[..., int] = function
    return bound


def _folder(folder: Path | None) -> Path:
    # Imported late, here and below: `python -m kvstrata.kernels.build` must not find itself imported with its package.
    from kvstrata.kernels.build import default_target

    return folder or default_target()


def _object(folder: Path, level: str) -> Path:
    from kvstrata.kernels.build import object_name

    return folder / object_name(level)


def _survey(folder: Path) -> dict[str, str | None]:
    """Level to why it cannot be used, None when it can."""
    portable = _object(folder, "portable")
    if not portable.is_file():
        return dict.fromkeys(LEVELS, "not built: run python -m kvstrata.kernels.build")
    try:
        library = ctypes.CDLL(str(portable))
        library.kvs_cpu_levels.restype = c_uint32
        version, supported = library.kvs_abi_version(), library.kvs_cpu_levels()
    except (OSError, AttributeError) as error:
        return dict.fromkeys(LEVELS, f"cannot be loaded: {error}")
    if version != ABI_VERSION:
        return dict.fromkeys(LEVELS, f"interface version {version}, needed {ABI_VERSION}: build again")
    survey: dict[str, str | None] = {}
    for level in LEVELS:
        if not _object(folder, level).is_file():
            survey[level] = "not built: the compiler rejected its flags, or the build is partial"
        elif not supported & _CPU_BITS[level]:
            survey[level] = "this CPU lacks the instructions"
        else:
            survey[level] = None
    return survey


def available_levels(folder: Path | None = None) -> tuple[str, ...]:
    """Levels that are built and that this CPU runs, slowest first."""
    return tuple(level for level, why in _survey(_folder(folder)).items() if why is None)


def load(level: str | None = None, folder: Path | None = None) -> NativeKernels | None:
    """Loads `level`, else the one that ``KVSTRATA_ISA`` names, else the best available.

    Returns None for ``torch``, and when nothing is named and nothing is available: callers then use PyTorch. Raises
    `ConfigurationError` for an unknown name, `KernelUnavailable` for a named level that is not built or not runnable.
    """
    source = "level"
    if level is None and (named := os.environ.get(ENVIRONMENT)):
        level, source = named, ENVIRONMENT
    if level == TORCH:
        return None
    if level is not None and level not in LEVELS:
        known = ", ".join((*LEVELS, TORCH))
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{source} must be one of {known}, got {level!r}")
    folder = _folder(folder)
    survey = _survey(folder)
    if level is None:
        level = next((name for name in reversed(LEVELS) if survey[name] is None), None)
        if level is None:
            return None
    elif (why := survey[level]) is not None:
        raise KernelUnavailable(
            Reason.KERNEL_UNAVAILABLE,
            f"{source} names the kernel level {level!r}, which is not available: {why}",
            f"unset {ENVIRONMENT} to use the best level, or set it to {TORCH}",
        )
    return NativeKernels(level, _object(folder, level))


def describe(folder: Path | None = None) -> KernelReport:
    """What `load` would use here and why the other levels are not available. Raises as `load` does."""
    folder = _folder(folder)
    survey = _survey(folder)
    kernels = load(folder=folder)
    return KernelReport(
        level=kernels.level if kernels else TORCH,
        available=tuple(level for level, why in survey.items() if why is None),
        unavailable={level: why for level, why in survey.items() if why is not None},
        forced=os.environ.get(ENVIRONMENT, ""),
    )
