"""Where prepared models and digests of model files are kept, and how a file is named by its bytes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

__all__ = ["default_cache_dir", "directory_digest", "file_digest"]

WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
"""Files of a model directory that hold weights."""

CONFIG_FIELDS_WITHOUT_MEANING = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
"""Fields of config.json that do not change which numbers the model computes (the dtype in use is named elsewhere)."""

_SETTLED_NS = 2_000_000_000
"""A file touched more recently may change again within one tick of the file system's clock."""

_BLOCK = 1 << 20


def default_cache_dir() -> Path:
    """`$KVSTRATA_CACHE`, else `$XDG_CACHE_HOME/kvstrata`, else `~/.cache/kvstrata`."""
    explicit = os.environ.get("KVSTRATA_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvstrata"


def file_digest(file: Path | Sequence[Path], cache_dir: Path, *, now_ns: Callable[[], int] = time.time_ns) -> str:
    """BLAKE3 of the bytes of a file, or of the file that several make one after the other; 64 hexadecimal digits.

    Remembered under `cache_dir` by path, inode, size and times, so that an unchanged file is read once. A file that
    changed within the last two seconds is not remembered. An unusable cache costs time, never the answer.
    Blocks while reading. Errors: OSError if the file cannot be read.
    """
    parts = [path.resolve() for path in ([file] if isinstance(file, Path) else file)]
    note = cache_dir / "digests" / f"{blake3(b'/'.join(map(os.fsencode, parts))).hexdigest()[:32]}.json"
    before = [_fingerprint(path) for path in parts]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        remembered = json.loads(note.read_text("utf-8"))
        if remembered["file"] == before:
            return str(remembered["blake3"])
    digest = _read_digest(parts)
    changed = max(int(stamp[key]) for stamp in before for key in ("mtime_ns", "ctime_ns"))
    if now_ns() - changed > _SETTLED_NS and [_fingerprint(path) for path in parts] == before:
        with contextlib.suppress(OSError):
            _replace_text(note, json.dumps({"file": before, "blake3": digest}))
    return digest


def _read_digest(parts: Sequence[Path]) -> str:
    whole = blake3()
    for path in parts:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                whole.update(block)
    return whole.hexdigest()


def directory_digest(directory: Path, cache_dir: Path) -> str:
    """BLAKE3 over the weights and the configuration of a Transformers directory, 64 hexadecimal digits.

    Covers the names and bytes of the weight files and the meaning of config.json (fields in any order, without the
    writer's version). Tokenizer and generation settings are left out: they change which tokens are asked for, and
    tokens are part of every chunk's own identity. Errors: OSError, or ValueError for a config.json that is not JSON.
    """
    config = json.loads((directory / "config.json").read_text("utf-8"))
    meaning = {key: value for key, value in config.items() if key not in CONFIG_FIELDS_WITHOUT_MEANING}
    weights = sorted({path for pattern in WEIGHT_PATTERNS for path in directory.glob(pattern)})
    parts = {path.name: file_digest(path, cache_dir) for path in weights}
    canonical = json.dumps({"config": meaning, "weights": parts}, sort_keys=True, separators=(",", ":"))
    return blake3(canonical.encode("utf-8")).hexdigest()


def _fingerprint(path: Path) -> dict[str, str | int]:
    stat = path.stat()
    return {
        "path": str(path),
        "inode": stat.st_ino,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
    }


def _replace_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as stream:
        try:
            stream.write(text)
            stream.close()
            Path(stream.name).replace(path)
        except BaseException:
            Path(stream.name).unlink(missing_ok=True)
            raise
