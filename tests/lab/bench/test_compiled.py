"""The benchmark of compiled steps, on a tiny model whose trace is run as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_chat_model import write_tiny_chat_model

from kvstrata.engines.transformers.compilation import CompilationWarning
from kvstrata.errors import UnsupportedError
from kvstrata.lab.bench import run_bench

SETTINGS: dict[str, Any] = {"dtypes": ["float32"], "lengths": [64, 200], "rounds": 3}


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **options: graph.forward)
    source = str(write_tiny_chat_model(tmp_path / "model", layers=2))
    seconds, *decode = run_bench("compile", source=source, **SETTINGS).rows
    assert (seconds.name, seconds.unit, seconds.met, seconds.n) == ("compile.float32.seconds", "s", None, 1)
    assert [row.name for row in decode] == ["compile.float32.64.decode", "compile.float32.200.decode"]
    for row in decode:
        assert row.ratio is not None
        assert (row.n, row.met) == (3, row.ratio <= 1.0)


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_fx(graph: Any, inputs: Any, **options: Any) -> Any:
        raise OSError("no such compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    source = str(write_tiny_chat_model(tmp_path / "model", layers=2))
    with pytest.warns(CompilationWarning), pytest.raises(UnsupportedError, match="no such compiler"):
        run_bench("compile", source=source, **SETTINGS)
