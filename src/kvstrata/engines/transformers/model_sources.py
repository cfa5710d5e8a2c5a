"""Where a model comes from: a name, a directory, a GGUF file or a hub id, made ready to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.engines.transformers.bundled_models import BUNDLED, BUNDLED_MODELS, bundled_parts, require_accepted
from kvstrata.engines.transformers.gguf_conversion import CONVERSION_VERSION, Progress, convert_once
from kvstrata.engines.transformers.model_cache import default_cache_dir, directory_digest, file_digest
from kvstrata.engines.transformers.progress_bars import without_progress_bars
from kvstrata.errors import ModelLoadError, Reason

__all__ = ["PreparedModel", "prepare_model"]

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class PreparedModel:
    """A model that lies on disk, ready to load.

    artefact: `blake3:<hex>` of the bytes that decide the weights.
    source: where it came from, for people.
    path: the Transformers directory.
    remedy: what to do if that directory turns out to be unusable.
    """

    artefact: str
    source: str
    path: Path
    remedy: str


def prepare_model(
    source: str | Path = BUNDLED,
    *,
    cache_dir: str | Path | None = None,
    accept_terms: bool = False,
    progress: Progress | None = None,
) -> PreparedModel:
    """Do the slow part of `load_model` (find, download, convert, hash) and nothing else; arguments as there."""
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    report = progress or (lambda stage, done: None)
    _require_transformers()
    with without_progress_bars():
        if isinstance(source, str) and source in BUNDLED_MODELS and not Path(source).exists():
            require_accepted(source, accept_terms)
            return _prepare_bundled(source, cache, report)
        path = Path(source).expanduser()
        if path.is_dir():
            return _prepare_directory(path.resolve(), str(path), cache)
        if path.is_file() and path.suffix.lower() == ".gguf":
            file = path.resolve()
            return _prepare_gguf([file], str(file), _digest([file], cache), cache, report)
        if path.exists():
            raise ModelLoadError(
                Reason.MODEL_UNAVAILABLE,
                f"{path} is a file, but not a .gguf file",
                "pass the directory that holds config.json and the weights, or a .gguf file",
            )
        if isinstance(source, Path) or path.is_absolute() or str(source)[:1] in ".~" or path.suffix.lower() == ".gguf":
            raise ModelLoadError(
                Reason.MODEL_UNAVAILABLE, f"{path} does not exist", f"check the path; {_names()} needs none"
            )
        return _prepare_hub(str(source), cache)


def _prepare_bundled(name: str, cache: Path, progress: Progress) -> PreparedModel:
    model, parts = BUNDLED_MODELS[name], bundled_parts(name)
    digest = _digest(parts, cache)
    source = str(parts[0]) if len(parts) == 1 else f"{model.file} in {len(parts)} parts from {parts[0].parent} on"
    if model.blake3 not in (None, digest):
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"{source} is not the file that {name!r} names: its BLAKE3 is {digest}, not {model.blake3}",
            f"install it again with --force-reinstall --no-cache-dir: {model.install}",
        )
    return _prepare_gguf(parts, source, digest, cache, progress)


def _digest(parts: Sequence[Path], cache: Path) -> str:
    try:
        return file_digest(parts, cache)
    except OSError as error:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE, f"{parts[0]} cannot be read: {error}", "check its permissions"
        ) from error


def _prepare_gguf(parts: Sequence[Path], source: str, digest: str, cache: Path, progress: Progress) -> PreparedModel:
    path = convert_once(parts, digest, cache, progress)
    return PreparedModel(
        artefact=f"blake3:{digest};gguf-conversion={CONVERSION_VERSION}",
        source=source,
        path=path,
        remedy=f"remove {path}; the next load converts the GGUF file again",
    )


def _prepare_directory(path: Path, source: str, cache: Path) -> PreparedModel:
    if not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"{path} holds no config.json",
            f"pass the file itself: {inside[0]}" if inside else "pass a directory written by save_pretrained()",
        )
    if (path / "adapter_config.json").exists():
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"{path} holds an adapter beside a model, and which weights result is not decided here",
            "merge the adapter, or load both yourself and name them when attaching",
        )
    try:
        digest = directory_digest(path, cache)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE, f"{path} cannot be read: {error}", "fetch or save the model again"
        ) from error
    return PreparedModel(
        artefact=f"blake3:{digest}",
        source=source,
        path=path,
        remedy="fetch or save the model again; a file may be damaged or a shard missing",
    )


def _prepare_hub(hub_id: str, cache: Path) -> PreparedModel:
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"there is no directory {hub_id!r}, and the model hub gave no model of that name: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}",
            "check the spelling and the network (HF_HUB_OFFLINE=1 allows only what is already downloaded), "
            f"or use {_names()}, a local directory or a .gguf file",
        ) from error
    return _prepare_directory(path, hub_id, cache)


def _names() -> str:
    return " or ".join(repr(name) for name in BUNDLED_MODELS)


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"loading a model needs Transformers: {error}",
            "pip install 'kvstrata[transformers]'",
        ) from error
