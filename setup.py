"""Build hook: compiles the native kernels as an optional part. Everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("kvstrata", "kernels")


def load_builder():
    # By path: importing the package would import PyTorch, which a build environment does not have.
    spec = importlib.util.spec_from_file_location("kvstrata_build", ROOT / "src" / PACKAGE / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Copies the Python files, then compiles the kernels beside them (beside the sources in an editable install)."""

    def run(self):
        super().run()
        base = ROOT / "src" if self.editable_mode else Path(self.build_lib)
        report = load_builder().build(base / PACKAGE / "_native", ROOT / "native")
        if not report.built:
            why = next(iter(report.failed.values()))
            print(f"WARNING: kvstrata is installed without native kernels and will use PyTorch: {why}", file=sys.stderr)


class KernelWheel(bdist_wheel):
    """Tags the wheel by what is in it: the kernels bind to no Python, only to the platform."""

    def get_tag(self):
        built = Path(self.get_finalized_command("build_py").build_lib, PACKAGE, "_native")
        native = list(built.glob("*.so"))
        return ("py3", "none", super().get_tag()[2] if native else "any")


class PlatformDistribution(Distribution):
    """Installs into the platform's folder, where shared objects belong."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": KernelWheel}, distclass=PlatformDistribution)
