from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_reference import exact_attention, rows_of, table_of

from kvstrata.contract.layout import SegmentLayout
from kvstrata.kernels import DecodeAttention
from kvstrata.kernels.build import LEVEL_FLAGS, build, find_compiler, main, object_name
from kvstrata.kernels.native import ENVIRONMENT, LEVELS, load


def test_a_failing_compiler_leaves_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    stale = tmp_path / object_name("avx2")
    stale.write_bytes(b"")
    report = build(tmp_path)
    assert report.built == ()
    assert set(report.failed) == set(LEVEL_FLAGS)
    assert list(tmp_path.iterdir()) == []
    assert load(folder=tmp_path) is None

    layout = SegmentLayout(1, 3, 16, "bfloat16")
    attention = DecodeAttention(layout, level="torch")
    key, value, query = rows_of(layout, 300)
    table = table_of(layout, 300)
    attention.append(key, value, table, 0)
    expected = exact_attention(query, key, value, 0.25)
    torch.testing.assert_close(attention.attend(query, table, 300).double(), expected, rtol=0, atol=1e-2)


def test_the_command_reports_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert main(["--target", str(tmp_path)]) == 1
    assert "left out avx2" in capsys.readouterr().err
    assert "no C++ sources" in build(tmp_path, tmp_path).failed["portable"]


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_level_that_compiles_is_loadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One level is enough here, and without optimisation: the others are built the same way.
    monkeypatch.setattr("kvstrata.kernels.build.LEVEL_FLAGS", {"portable": ("-O0",)})
    assert build(tmp_path).built == ("portable",)
    kernels = load("portable", tmp_path)
    assert kernels is not None
    assert kernels.path.parent == tmp_path


def test_the_module_runs_without_being_imported_twice() -> None:
    """Its package must not import it: runpy warns then, and the module's state exists twice."""
    command = [sys.executable, "-W", "error", "-m", "kvstrata.kernels.build", "--help"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_loader_knows_the_levels_that_are_built() -> None:
    assert tuple(LEVEL_FLAGS) == LEVELS
