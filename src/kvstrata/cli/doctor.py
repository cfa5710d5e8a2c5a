"""`kvstrata doctor`: what this machine offers, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvstrata.cli.app import version
from kvstrata.cli.exits import ExitCode
from kvstrata.cli.options import STORE_VARIABLE, JsonOption
from kvstrata.cli.output import Output, byte_text
from kvstrata.errors import KvstrataError
from kvstrata.store import Store

__all__ = ["Check", "State", "examine", "register"]

_REQUIRED = ("torch", "numpy", "xxhash", "blake3")
_OPTIONAL = {
    "transformers": "transformers",
    "gguf": "transformers",
    "accelerate": "transformers",
    "typer": "cli",
    "rich": "cli",
    "matplotlib": "report",
    "jinja2": "report",
}
_COMPILERS = ("c++", "g++", "clang++")


class State(StrEnum):
    """MISSING parts are optional; FAILED ones are needed."""

    OK = "ok"
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: what was looked at, what was found, and what to do when it is not OK."""

    name: str
    state: State
    found: str
    next_step: str = ""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", epilog="Example: `kvstrata doctor --store ./store --json`")(doctor)


def doctor(
    store: Annotated[
        Path | None, typer.Option("--store", metavar="PATH", envvar=STORE_VARIABLE, help="A store to look at as well.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Report versions, instruction level, compiler, memory and tiers. Exit code 1 when a needed part fails."""
    checks = examine(store)
    failed = any(check.state is State.FAILED for check in checks)
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        advice = f"\n-> {check.next_step}" if check.next_step else ""
        table.add_row(Text(check.state), Text(check.name), Text(check.found + advice))
    Output(json).result({"ok": not failed, "checks": [asdict(check) for check in checks]}, table)
    return ExitCode.CHECK_FAILED if failed else ExitCode.OK


def examine(store: Path | None) -> list[Check]:
    """Look at everything; imports PyTorch only where an accelerator is present. Blocks."""
    checks = [
        Check("kvstrata", State.OK, version()),
        _python(),
        *(_package(name, None) for name in _REQUIRED),
        *(_package(name, extra) for name, extra in _OPTIONAL.items()),
        _kernels(),
        _compiler(),
        _memory(),
        _huge_pages(),
        Check("memory tier", State.OK, f"{os.cpu_count()} logical CPUs"),
        _accelerator(),
        Check("file tier", State.OK, "available; name a store with --store to look at it"),
    ]
    if store is not None:
        checks[-1] = _store(store)
    return checks


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("python", State.OK, found)
    return Check("python", State.FAILED, found, "use Python 3.11 to 3.13")


def _package(name: str, extra: str | None) -> Check:
    try:
        return Check(name, State.OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        if extra is None:
            return Check(name, State.FAILED, "not installed", f"pip install {name}")
        return Check(name, State.MISSING, "not installed", f"pip install 'kvstrata[{extra}]'")


def _kernels() -> Check:
    step = "install a C++ compiler and reinstall kvstrata; until then attention runs in PyTorch, with the same answers"
    try:
        from kvstrata.kernels.native import describe

        report = describe()
    except KvstrataError as error:
        return Check("native kernels", State.FAILED, error.cause, error.next_step)
    except (ImportError, OSError) as error:
        return Check("native kernels", State.MISSING, f"{type(error).__name__}: {error}", step)
    others = "".join(f"; {level}: {why}" for level, why in report.unavailable.items())
    found = f"{report.level} in use" + (" (forced)" if report.forced else "") + others
    if report.available:
        return Check("native kernels", State.OK, found)
    return Check("native kernels", State.MISSING, found, step)


def _compiler() -> Check:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return Check("C++ compiler", State.OK, path)
    return Check("C++ compiler", State.MISSING, f"none of {', '.join(_COMPILERS)}", "apt install g++, or the like")


def _memory() -> Check:
    values = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            label, _, rest = line.partition(":")
            values[label] = int(rest.split()[0]) * 1024
        found = f"{byte_text(values['MemTotal'])}, {byte_text(values['MemAvailable'])} available"
    except (OSError, KeyError, ValueError, IndexError):
        return Check("memory", State.MISSING, "the system does not tell", "give every budget explicitly")
    return Check("memory", State.OK, found)


def _huge_pages() -> Check:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return Check("huge pages", State.MISSING, "the system does not tell; arenas use ordinary pages")
    if "[never]" in text:
        step = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root, makes large arenas faster"
        return Check("huge pages", State.MISSING, text, step)
    return Check("huge pages", State.OK, text)


def _accelerator() -> Check:
    if not Path("/dev/nvidiactl").exists():
        return Check("device tier", State.MISSING, "no NVIDIA device; the CPU and host memory are used")
    try:
        import torch

        if torch.cuda.is_available():
            return Check("device tier", State.OK, torch.cuda.get_device_name(0))
        build = torch.__version__
    except (ImportError, RuntimeError, OSError) as error:
        return Check("device tier", State.MISSING, f"{type(error).__name__}: {error}", "reinstall torch")
    return Check("device tier", State.MISSING, f"torch {build} cannot use the device", "install a CUDA build of torch")


def _store(path: Path) -> Check:
    try:
        with Store(path, create=False) as opened:
            usage = opened.usage()
            mode = "read only, " if opened.read_only else ""
    except KvstrataError as error:
        return Check("file tier", State.FAILED, error.cause, error.next_step)
    free = byte_text(shutil.disk_usage(path).free)
    return Check("file tier", State.OK, f"{path}: {mode}{byte_text(usage.total_bytes)} used, {free} free on the disk")
