"""The cap of a store is hard over all writers, and what the catalog counts is what lies on the disk."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from chunks_and_faults import FaultyFiles, flip, make_chunk, make_context, make_history, tree, write_all

from kvstrata.errors import ConfigurationError, Reason, StoreError
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import Store
from kvstrata.tiers.files import FileTier


def file_bytes(tmp_path: Path) -> int:
    return FileTier(tmp_path / "size").write(*make_chunk().arguments).bytes


def agrees(store: Store) -> bool:
    assert store.catalog is not None
    return store.catalog.figures().used_bytes == store.usage().total_bytes


def test_a_chunk_that_would_pass_the_cap_is_refused(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    with Store(tmp_path / "store", max_bytes=2 * size + 1000, retention=None) as store:
        store.tier.write(*make_chunk(1).arguments)
        store.tier.write(*make_chunk(2).arguments)
        with pytest.raises(StoreError) as refusal:
            store.tier.write(*make_chunk(3).arguments)
        assert refusal.value.reason is Reason.STORE_FULL
        assert str(2 * size + 1000) in refusal.value.cause
        assert len(list(store.tier.list())) == 2
        assert tree(tmp_path / "store" / "tmp") == {}
        assert agrees(store)


@pytest.mark.parametrize("folder", ["tmp", "damaged"])
def test_temporary_and_damaged_files_count(tmp_path: Path, folder: str) -> None:
    size = file_bytes(tmp_path)
    root = tmp_path / "store"
    with Store(root):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "left").write_bytes(bytes(size))
        with Store(root, max_bytes=2 * size - 1) as store, pytest.raises(StoreError) as refusal:
            store.tier.write(*make_chunk().arguments)
    assert refusal.value.reason is Reason.STORE_FULL


def test_a_manifest_that_would_pass_the_cap_is_refused(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    ids = tuple(range(128))
    with Store(tmp_path / "store", max_bytes=size + 300) as store:
        chunks = write_all(store.tier, make_history(make_context(), ids))
        with pytest.raises(StoreError) as refusal:
            SessionStore(store).save("chat", make_context(), ids, chunks, len(ids))
        assert refusal.value.reason is Reason.STORE_FULL
        assert SessionStore(store).list() == []
        assert agrees(store)


def test_writers_at_the_same_time_do_not_pass_the_cap_together(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    root = tmp_path / "store"
    refused: list[Reason] = []

    def write(seed: int) -> None:
        try:
            with Store(root, max_bytes=3 * size + 1000, retention=None) as store:
                store.tier.write(*make_chunk(seed).arguments)
        except StoreError as error:
            refused.append(error.reason)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store(root) as store:
        # A reservation that was given back a moment later may have refused one that would have fitted.
        assert len(list(store.tier.list())) == 3
        assert refused == [Reason.STORE_FULL] * 5
        assert agrees(store)


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_that_is_not_positive_is_refused(tmp_path: Path, cap: int) -> None:
    with pytest.raises(ConfigurationError, match="max_bytes"):
        Store(tmp_path / "store", max_bytes=cap)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("seed", range(4))
def test_the_count_agrees_with_a_walk_after_everything_that_can_happen(tmp_path: Path, seed: int) -> None:
    """Writes, refused ones, damage, sessions, their removal and evictions, in a random order."""
    source = random.Random(seed)
    files = FaultyFiles()
    with Store(tmp_path / "store", files=files) as store:
        sessions = SessionStore(store)
        for step in range(60):
            stored = sorted(store.tier.list())
            match source.randrange(7):
                case 0 | 1:
                    store.tier.write(*make_chunk(source.randrange(20), tokens=source.choice((1, 70, 128))).arguments)
                case 2:
                    files.named["link"] = 28
                    with pytest.raises(StoreError):
                        store.tier.write(*make_chunk(1000 + step).arguments)
                    files.named.clear()
                case 3 if stored:
                    flip(store.tier.path(source.choice(stored)), 9000)
                    for verdict in store.verify():
                        if not verdict.sound:
                            store.tier.revoke(verdict.chunk)
                case 4:
                    ids = tuple(range(source.randrange(1, 300)))
                    chunks = write_all(store.tier, make_history(make_context(), ids))
                    sessions.save(f"chat {step % 3}", make_context(), ids, chunks, len(ids))
                case 5 if summaries := sessions.list():
                    latest = source.choice(summaries).latest
                    assert latest is not None
                    sessions.remove(latest.name, sequence=latest.sequence)
                case 6 if stored:
                    store.evict(source.sample(stored, min(3, len(stored))))
            assert agrees(store), step
        assert store.catalog is not None
        assert store.catalog.figures().chunks == store.usage().chunks
