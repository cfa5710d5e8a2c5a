"""Compiles the native kernels: one shared object per instruction-set level, each from the same sources.

``python -m kvstrata.kernels.build`` compiles into the package itself; ``setup.py`` loads this file by path, so it
imports nothing but the standard library. A level whose flags the compiler rejects is left out; with none built the
package works on PyTorch alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LEVEL_FLAGS", "BuildReport", "build", "main", "object_name"]

LEVEL_FLAGS: Mapping[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}
"""Compiler flags of each level, slowest first."""

# No -ffast-math: an object linked with it makes the whole process flush subnormal numbers to zero.
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-pthread", "-shared")


@dataclass(frozen=True)
class BuildReport:
    """What a build made.

    Attributes:
        built: levels whose shared object was written.
        failed: level to the reason why it was not.
    """

    built: tuple[str, ...]
    failed: Mapping[str, str]


def object_name(level: str) -> str:
    """File name of a level's shared object."""
    return f"libkvstrata_{level}.so"


def default_target() -> Path:
    """Folder that the loader reads."""
    return Path(__file__).resolve().parent / "_native"


def default_sources() -> Path:
    """Folder of the C++ sources in a source checkout."""
    return Path(__file__).resolve().parents[3] / "native"


def find_compiler() -> list[str] | None:
    """Command of the C++ compiler: ``CXX`` if set, else the first of c++, g++, clang++ on the path."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    return next(([path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def build(target: Path | None = None, sources: Path | None = None) -> BuildReport:
    """Compiles every level into `target`; blocks for some seconds. Never raises for a compiler that fails.

    An object of a level that cannot be built any more is removed, so that no stale one is loaded.
    """
    target, sources = target or default_target(), sources or default_sources()
    compiler = find_compiler()
    files = sorted(sources.glob("*.cpp"))
    if not files:
        return BuildReport((), dict.fromkeys(LEVEL_FLAGS, f"no C++ sources in {sources}"))
    if compiler is None:
        return BuildReport((), dict.fromkeys(LEVEL_FLAGS, "no C++ compiler found: set CXX or install g++"))
    target.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=min(len(LEVEL_FLAGS), os.cpu_count() or 1)) as crew:
        outcomes = list(crew.map(lambda level: _compile(compiler, level, files, target), LEVEL_FLAGS))
    results = dict(zip(LEVEL_FLAGS, outcomes, strict=True))
    return BuildReport(
        tuple(level for level, why in results.items() if why is None),
        {level: why for level, why in results.items() if why is not None},
    )


def _compile(compiler: list[str], level: str, files: list[Path], target: Path) -> str | None:
    """Writes one level's object whole or not at all; returns why not."""
    final = target / object_name(level)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        made = Path(folder) / final.name
        command = [*compiler, *COMMON_FLAGS, *LEVEL_FLAGS[level], *map(str, files), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=300)
            why = _first_error(done.stderr) or f"{compiler[0]} exited {done.returncode}" if done.returncode else None
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why is None and not made.is_file():
            why = f"{compiler[0]} wrote no object"
        if why is None:
            made.replace(final)
        else:
            final.unlink(missing_ok=True)
    return why


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the build. Exit code 0 when at least one level was built, else 1."""
    parser = argparse.ArgumentParser(prog="python -m kvstrata.kernels.build", description="Compile the native kernels.")
    parser.add_argument("--target", type=Path, default=None, help="folder for the objects (default: the package)")
    parser.add_argument("--sources", type=Path, default=None, help="folder of the C++ sources (default: native/)")
    options = parser.parse_args(arguments)
    report = build(options.target, options.sources)
    for level in report.built:
        sys.stdout.write(f"built {level}\n")
    for level, why in report.failed.items():
        sys.stderr.write(f"left out {level}: {why}\n")
    return 0 if report.built else 1


if __name__ == "__main__":
    sys.exit(main())
