"""Several chunks in one call: visible together or not at all where a journal says what is published."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import pytest
from chunks_and_faults import FaultyFiles, make_chunk, make_history, tree

from kvstrata.errors import ConfigurationError, Reason, StoreError
from kvstrata.store import Store
from kvstrata.tiers.files import FileTier, WriteOutcome

CHUNKS = [make_chunk(seed) for seed in range(3)]
BATCH = [chunk.arguments for chunk in CHUNKS]


def assert_whole(tier: FileTier) -> None:
    assert set(tier.list()) == {chunk.digest for chunk in CHUNKS}
    for chunk in CHUNKS:
        with tier.open(chunk.digest) as file:
            file.verify_payload()


@pytest.mark.parametrize("durable", [False, True])
def test_all_are_there_and_nothing_is_left_over(tmp_path: Path, durable: bool) -> None:
    with Store(tmp_path, durable=durable) as store:
        receipts = store.file_tier.write_all(BATCH)
        assert [receipt.outcome for receipt in receipts] == [WriteOutcome.WRITTEN] * 3
        assert_whole(store.file_tier)
        assert store.catalog is not None
        figures = store.catalog.figures()
        assert (figures.chunks, figures.reserved_bytes) == (3, 0)
        assert figures.chunk_bytes == sum(receipt.bytes for receipt in receipts)
        assert tree(tmp_path / "tmp") == {}
        assert store.audit() == []


def test_what_is_there_is_kept_and_the_rest_written(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.file_tier.write(*BATCH[1])
        outcomes = [receipt.outcome for receipt in store.file_tier.write_all(BATCH)]
        assert outcomes == [WriteOutcome.WRITTEN, WriteOutcome.ALREADY_PRESENT, WriteOutcome.WRITTEN]
        assert_whole(store.file_tier)


def test_generations_are_told_apart(tmp_path: Path) -> None:
    history = make_history(CHUNKS[0].identity.context, range(4 * 128))
    with Store(tmp_path) as store:
        store.file_tier.write_all([chunk.arguments for chunk in history])
        assert store.catalog is not None
        rows = store.catalog.database.read(
            lambda database: database.execute("SELECT replica_generation FROM chunks ORDER BY start").fetchall()
        )
        assert [later[0] - earlier[0] for earlier, later in itertools.pairwise(rows)] == [1, 1, 1]


@pytest.mark.parametrize("durable", [False, True])
def test_whatever_call_fails_none_of_them_is_visible(tmp_path: Path, durable: bool) -> None:
    counting = FaultyFiles()
    with Store(tmp_path / "count", files=counting, durable=durable) as store:
        before = len(counting.calls)
        store.file_tier.write_all(BATCH)
        calls = counting.calls[before:]
    final = len(calls) - 3
    assert calls[final:] == ["unlink"] * 3
    for index in range(final):
        files = FaultyFiles()
        with Store(tmp_path / str(index), files=files, durable=durable) as store:
            files.plan[len(files.calls) + index] = errno.ENOSPC
            with pytest.raises(StoreError) as refusal:
                store.file_tier.write_all(BATCH)
            assert refusal.value.reason is Reason.STORE_FULL, calls[index]
            assert list(store.file_tier.list()) == [], calls[index]
            assert list((tmp_path / str(index) / "chunks").rglob("*.kv")) == [], calls[index]
            assert tree(tmp_path / str(index) / "tmp") == {}, calls[index]
            store.file_tier.write_all(BATCH)
            assert_whole(store.file_tier)


def test_under_a_cap_that_is_too_small_for_all_nothing_is_written(tmp_path: Path) -> None:
    size = FileTier(tmp_path / "size").write(*BATCH[0]).bytes
    with Store(tmp_path / "store", max_bytes=2 * size + 20_000) as store:
        with pytest.raises(StoreError) as refusal:
            store.file_tier.write_all(BATCH)
        assert refusal.value.reason is Reason.STORE_FULL
        assert list(store.file_tier.list()) == []
        assert store.catalog is not None
        assert store.catalog.figures().reserved_bytes == 0


def test_a_chunk_that_comes_twice_is_misuse(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        FileTier(tmp_path).write_all([BATCH[0], BATCH[0]])
