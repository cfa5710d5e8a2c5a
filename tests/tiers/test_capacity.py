"""The cap of a durable tier is hard: published, temporary and damaged files count, over all writers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import make_chunk, tree

from kvstrata.errors import ConfigurationError, Reason, StoreError
from kvstrata.tiers.capacity import Capacity
from kvstrata.tiers.files import FileTier


def file_bytes(tmp_path: Path) -> int:
    return FileTier(tmp_path / "size").write(*make_chunk().arguments).bytes


def test_a_chunk_that_would_pass_the_cap_is_refused(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    tier = FileTier(tmp_path / "tier", max_bytes=2 * size)
    tier.write(*make_chunk(1).arguments)
    tier.write(*make_chunk(2).arguments)
    with pytest.raises(StoreError) as refusal:
        tier.write(*make_chunk(3).arguments)
    assert refusal.value.reason is Reason.STORE_FULL
    assert str(2 * size) in refusal.value.cause
    assert len(list(tier.list())) == 2
    assert tree(tmp_path / "tier" / "tmp") == {}


@pytest.mark.parametrize("folder", ["tmp", "damaged"])
def test_temporary_and_damaged_files_count(tmp_path: Path, folder: str) -> None:
    size = file_bytes(tmp_path)
    root = tmp_path / "tier"
    (root / folder).mkdir(parents=True)
    (root / folder / "left").write_bytes(bytes(size))
    tier = FileTier(root, max_bytes=2 * size - 1)
    with pytest.raises(StoreError) as refusal:
        tier.write(*make_chunk().arguments)
    assert refusal.value.reason is Reason.STORE_FULL


def test_writers_at_the_same_time_do_not_pass_the_cap_together(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    root = tmp_path / "tier"
    refused: list[Reason] = []

    def write(seed: int) -> None:
        try:
            FileTier(root, max_bytes=3 * size).write(*make_chunk(seed).arguments)
        except StoreError as error:
            refused.append(error.reason)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(FileTier(root).list())) == 3
    assert refused == [Reason.STORE_FULL] * 5
    assert Capacity(root, 3 * size).used() == 3 * size


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_that_is_not_positive_is_refused(tmp_path: Path, cap: int) -> None:
    with pytest.raises(ConfigurationError, match="max_bytes"):
        FileTier(tmp_path, max_bytes=cap)


def test_a_file_that_moves_during_the_count_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication between the visits of two folders: the file is gone from tmp before chunks is looked at."""
    size = file_bytes(tmp_path)
    root = tmp_path / "tier"
    (root / "tmp").mkdir(parents=True)
    (root / "tmp" / "writing").write_bytes(bytes(size))
    real, seen = os.walk, []

    def walk(top: Path, **options: Any) -> Any:
        for entry in real(top, **options):
            yield entry
            seen.append(entry[0])
            if Path(entry[0]) == root / "tmp":
                (root / "chunks" / "ab").mkdir(parents=True)
                (root / "tmp" / "writing").rename(root / "chunks" / "ab" / "published.kv")

    monkeypatch.setattr(os, "walk", walk)
    assert Capacity(root, 10 * size).used() == size
    assert str(root / "chunks" / "ab") in seen
