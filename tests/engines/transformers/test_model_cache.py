"""Digests follow the bytes, and are remembered only for files that have come to rest."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from blake3 import blake3

from kvstrata.engines.transformers.model_cache import default_cache_dir, directory_digest, file_digest


def later() -> int:
    return time.time_ns() + 10_000_000_000


def only_note(cache: Path) -> Path:
    (note,) = (cache / "digests").iterdir()
    return note


def test_digest_is_blake3_of_the_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    file = tmp_path / "weights"
    file.write_bytes(data)
    assert file_digest(file, tmp_path / "cache") == blake3(data).hexdigest()


def test_digest_of_parts_is_that_of_the_whole(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    parts = [tmp_path / "second", tmp_path / "first"]
    parts[0].write_bytes(data[:12345])
    parts[1].write_bytes(data[12345:])
    assert file_digest(parts, tmp_path / "cache", now_ns=later) == blake3(data).hexdigest()
    assert file_digest(parts[::-1], tmp_path / "cache") == blake3(data[12345:] + data[:12345]).hexdigest()


def test_change_of_one_part_is_seen(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    for part in parts:
        part.write_bytes(b"abc")
    file_digest(parts, tmp_path / "cache", now_ns=later)
    parts[1].write_bytes(b"abcd")
    assert file_digest(parts, tmp_path / "cache") == blake3(b"abcabcd").hexdigest()


def test_unchanged_file_is_read_once(tmp_path: Path) -> None:
    file, cache = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(b"abc")
    file_digest(file, cache, now_ns=later)
    note = only_note(cache)
    # A value that no reading could give shows where the second answer comes from.
    note.write_text(json.dumps({**json.loads(note.read_text()), "blake3": "remembered"}))
    assert file_digest(file, cache) == "remembered"


def test_changed_file_is_read_again_even_with_size_and_mtime_kept(tmp_path: Path) -> None:
    file, cache = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(b"abc")
    before = file.stat()
    file_digest(file, cache, now_ns=later)
    file.write_bytes(b"abd")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    if file.stat().st_ctime_ns == before.st_ctime_ns:
        pytest.skip("the file system's clock did not tick between two writes")
    assert file_digest(file, cache) == blake3(b"abd").hexdigest()


def test_fresh_file_is_not_remembered(tmp_path: Path) -> None:
    file, cache = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(b"abc")
    file_digest(file, cache, now_ns=lambda: file.stat().st_mtime_ns + 1)
    assert not (cache / "digests").exists()


@pytest.mark.parametrize("note", ["", "null", "[]", '{"file": 3}'])
def test_damaged_note_costs_time_only(tmp_path: Path, note: str) -> None:
    file, cache = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(b"abc")
    file_digest(file, cache, now_ns=later)
    only_note(cache).write_text(note)
    assert file_digest(file, cache) == blake3(b"abc").hexdigest()


def test_unusable_cache_costs_time_only(tmp_path: Path) -> None:
    file, occupied = tmp_path / "weights", tmp_path / "occupied"
    file.write_bytes(b"abc")
    occupied.write_bytes(b"")
    assert file_digest(file, occupied, now_ns=later) == blake3(b"abc").hexdigest()


def write_model(directory: Path, *, theta: float = 1e4, weights: bytes = b"w", version: str = "5.19.0") -> Path:
    directory.mkdir()
    config = {"model_type": "llama", "rope_theta": theta, "transformers_version": version, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def test_directory_digest_follows_meaning(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    base = directory_digest(write_model(tmp_path / "base"), cache)
    assert directory_digest(write_model(tmp_path / "writer", version="5.24.0"), cache) == base
    assert directory_digest(write_model(tmp_path / "theta", theta=1e5), cache) != base
    assert directory_digest(write_model(tmp_path / "weights", weights=b"v"), cache) != base
    second_shard = write_model(tmp_path / "shards")
    (second_shard / "model-2.safetensors").write_bytes(b"x")
    assert directory_digest(second_shard, cache) != base
    retokenized = write_model(tmp_path / "tokenizer")
    (retokenized / "tokenizer.json").write_text("{}")
    assert directory_digest(retokenized, cache) == base


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"KVSTRATA_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/kvstrata"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/kvstrata"),
    ],
)
def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("KVSTRATA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == Path(expected)
