from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, KernelUnavailable
from kvstrata.kernels import DecodeAttention, PartialState, available_levels, describe
from kvstrata.kernels.native import ENVIRONMENT, NativeKernels, load

needs_native = pytest.mark.skipif(not available_levels(), reason="native kernels are not built")


def _loaded(level: str | None = None) -> NativeKernels:
    kernels = load(level)
    assert kernels is not None
    return kernels


@needs_native
def test_the_best_available_level_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert _loaded().level == available_levels()[-1]
    report = describe()
    assert report.level == available_levels()[-1]
    assert {*report.available, *report.unavailable} == {"portable", "avx2", "avx512"}
    assert all(report.unavailable.values())


@needs_native
def test_the_environment_names_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SegmentLayout(1, 1, 8, "float32")
    monkeypatch.setenv(ENVIRONMENT, "portable")
    assert DecodeAttention(layout).level == "portable"
    assert describe().forced == "portable"
    monkeypatch.setenv(ENVIRONMENT, "torch")
    assert load() is None
    assert DecodeAttention(layout).level == "torch"
    assert DecodeAttention(layout, level="portable").level == "portable"
    monkeypatch.setenv(ENVIRONMENT, "sse9")
    with pytest.raises(ConfigurationError, match=r"KVSTRATA_ISA must be one of .*, got 'sse9'"):
        load()


def test_a_named_level_that_is_not_built_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert load(folder=tmp_path) is None
    assert available_levels(tmp_path) == ()
    with pytest.raises(KernelUnavailable, match=r"'avx2'.*not built: run python -m kvstrata.kernels.build"):
        load("avx2", tmp_path)


def test_an_object_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    (tmp_path / "libkvstrata_portable.so").write_bytes(b"not an object")
    assert load(folder=tmp_path) is None
    assert "cannot be loaded" in describe(tmp_path).unavailable["portable"]


@needs_native
def test_loading_leaves_subnormal_numbers_alone() -> None:
    for level in available_levels():
        _loaded(level)
        tiny = torch.tensor([1e-40], dtype=torch.float32)
        assert (tiny * 0.5).item() > 0
        assert 5e-324 / 1 > 0


@needs_native
def test_importing_loads_nothing() -> None:
    code = "import kvstrata.kernels; print('libkvstrata' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert done.stdout.strip() == "False"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@needs_native
@pytest.mark.parametrize("level", available_levels())
def test_merge_matches_the_reference(level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        PartialState(*(torch.randn(*shape, generator=generator) for shape in ((6,), (6,), (6, 40)))) for _ in range(2)
    )
    a.m[0] = b.m[0] = b.m[1] = -torch.inf
    for state in (a, b):
        state.l[state.m.isinf()], state.u[state.m.isinf()] = 0.0, 0.0
    out = PartialState(torch.empty(6), torch.empty(6), torch.empty(6, 40))
    states = [tensor.data_ptr() for state in (a, b, out) for tensor in (state.m, state.l, state.u)]
    kernels = _loaded(level)
    kernels.check(kernels.merge(6, 40, *states))
    expected = a.merge(b)
    assert torch.equal(out.m, expected.m)
    torch.testing.assert_close(out.l, expected.l, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.u, expected.u, rtol=1e-6, atol=1e-6)
