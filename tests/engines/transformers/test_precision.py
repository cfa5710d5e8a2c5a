"""The dtype that `auto` stands for follows the CPU's flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.engines.transformers.precision import choose_dtype
from kvstrata.errors import ConfigurationError


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu avx2 fma", "float32"),
        ("fpu avx2 avx512f", "float32"),
        ("fpu avx512_bf16 avx2", "bfloat16"),
        ("amx_bf16", "bfloat16"),
    ],
)
def test_auto_wants_native_bfloat16(tmp_path: Path, flags: str, name: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name\t: avx512_bf16 in a name\nflags\t\t: {flags}\n", encoding="utf-8")
    choice = choose_dtype("auto", file)
    assert choice.name == name
    assert "bf16" in choice.reason


def test_without_cpuinfo_auto_is_float32(tmp_path: Path) -> None:
    assert choose_dtype("auto", tmp_path / "absent").name == "float32"


def test_a_name_is_taken_as_it_is_and_an_unknown_one_refused() -> None:
    assert choose_dtype("bfloat16").name == "bfloat16"
    with pytest.raises(ConfigurationError, match="int8"):
        choose_dtype("int8")
