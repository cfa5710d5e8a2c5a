"""Faults of durable tiers that people reported against other systems, each as a kind of fault.

The number of the public report stands beside each test.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chunks_and_faults import Chunk, FaultyFiles, flip, make_chunk, tree

from kvstrata.contract.identity import EXACT, Namespace
from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import Store
from kvstrata.tiers.files import FileTier, WriteOutcome


def read(tier: FileTier, chunk: Chunk, layer: int = 0) -> bytes:
    with tier.open(chunk.digest) as file:
        target = memoryview(bytearray(file.segment_bytes))
        file.read_into(layer, [target])
    return bytes(target)


def test_a_chunk_is_no_hit_before_its_writer_has_finished(tmp_path: Path) -> None:
    """vllm#45704: a block was visible before its producer was done."""
    chunk = make_chunk()
    files = FaultyFiles()
    seen: list[bool] = []
    watcher = FileTier(tmp_path)
    plain = files.pwritev

    def watched(*arguments: object) -> int:
        seen.append(watcher.has(chunk.digest))
        return int(plain(*arguments))

    files.pwritev = watched  # type: ignore[attr-defined]
    FileTier(tmp_path, files=files).write(*chunk.arguments)
    assert seen
    assert not any(seen)
    assert watcher.has(chunk.digest)


def test_a_load_that_failed_becomes_a_miss_and_can_be_stored_again(tmp_path: Path) -> None:
    """vllm#49176: a failed load stayed a hit and was tried for ever."""
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    flip(tier.path(chunk.digest), 6000)
    with pytest.raises(DamagedError):
        read(tier, chunk)
    tier.revoke(chunk.digest)
    assert not tier.has(chunk.digest)
    assert tier.write(*chunk.arguments).outcome is WriteOutcome.WRITTEN
    assert read(tier, chunk) == chunk.payload(0)


@pytest.mark.parametrize("byte", [4096, 5000, 12287])
def test_wrong_bytes_of_the_right_length_never_load(tmp_path: Path, byte: int) -> None:
    """vllm#54363: wrong bytes of the right length loaded silently."""
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    flip(tier.path(chunk.digest), byte)
    with pytest.raises(DamagedError) as refusal:
        read(tier, chunk)
    assert refusal.value.reason is Reason.CHUNK_DAMAGED


def test_a_full_disk_is_a_refusal_and_reading_goes_on(tmp_path: Path) -> None:
    """LMCache#4664: a full disk broke the server."""
    stored, lost = make_chunk(0), make_chunk(1)
    files = FaultyFiles()
    tier = FileTier(tmp_path, files=files)
    tier.write(*stored.arguments)
    files.named["allocate"] = 28
    for _ in range(3):
        with pytest.raises(StoreError) as refusal:
            tier.write(*lost.arguments)
        assert refusal.value.reason is Reason.STORE_FULL
        assert read(tier, stored) == stored.payload(0)
    del files.named["allocate"]
    tier.write(*lost.arguments)
    assert read(tier, lost) == lost.payload(0)


@pytest.mark.parametrize(("retention", "refusals"), [(None, 7), ("lru", 0)])
def test_the_cap_is_never_passed_not_even_for_a_moment(tmp_path: Path, retention: str | None, refusals: int) -> None:
    """LMCache#1454: the disk tier passed its cap by far."""
    size = FileTier(tmp_path / "size").write(*make_chunk().arguments).bytes
    cap = 3 * size + size // 2
    root = tmp_path / "store"
    most: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            try:
                found = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith("catalog.")]
                unique = {path.stat().st_ino: path.stat().st_size for path in found}
            except FileNotFoundError:
                continue
            most.append(sum(unique.values()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    refused = 0
    try:
        for seed in range(10):
            try:
                with Store(root, max_bytes=cap, retention=retention) as store:
                    store.tier.write(*make_chunk(seed).arguments)
            except StoreError as error:
                refused += error.reason is Reason.STORE_FULL
    finally:
        stop.set()
        watcher.join()
    assert refused == refusals
    assert max(most) <= cap


@pytest.mark.parametrize("other", [Namespace("bob"), Namespace("alice", "salt"), Namespace("alic", "e")])
def test_no_tenant_or_salt_is_served_the_rows_of_another(tmp_path: Path, other: Namespace) -> None:
    """LMCache#4825, sglang#37160: the cache salt was dropped."""
    mine, theirs = make_chunk(namespace=Namespace("alice")), make_chunk(namespace=other)
    assert mine.identity.token_ids == theirs.identity.token_ids
    tier = FileTier(tmp_path)
    tier.write(*mine.arguments)
    assert not tier.has(theirs.digest)
    tier.path(theirs.digest).parent.mkdir(parents=True, exist_ok=True)
    tier.path(theirs.digest).write_bytes(tier.path(mine.digest).read_bytes())
    with pytest.raises(DamagedError) as refusal:
        tier.open(theirs.digest)
    assert refusal.value.reason is Reason.CHUNK_FOREIGN


def test_token_ids_are_compared_and_not_only_a_short_hash(tmp_path: Path) -> None:
    """vllm#12621: a short hash collided and foreign blocks were used."""
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    assert len(chunk.digest) == 32
    with tier.open(chunk.digest) as file:
        assert file.identity.token_ids == chunk.identity.token_ids


def test_rows_of_approximate_lineage_are_never_found_for_exact(tmp_path: Path) -> None:
    """vllm#49250, as a kind: an answer may not depend on which rows happened to be stored."""
    approximate = make_chunk(lineage="approximate:quest")
    exact = make_chunk(lineage=EXACT)
    tier = FileTier(tmp_path)
    tier.write(*approximate.arguments)
    assert not tier.has(exact.digest)


@pytest.mark.parametrize("call", ["allocate", "pwritev", "preadv", "link"])
def test_an_aborted_write_leaves_nothing_reserved(tmp_path: Path, call: str) -> None:
    """vllm PR#32255: aborted transfers freed their blocks early, or never."""
    files = FaultyFiles(named={call: 5})
    with pytest.raises(StoreError):
        FileTier(tmp_path, files=files).write(*make_chunk().arguments)
    assert tree(tmp_path) == {}
    # The first one looks for a file of that name, and there is none.
    assert files.calls.count("open") == files.calls.count("close") + 1


def test_a_removed_session_never_takes_what_a_reader_holds(tmp_path: Path) -> None:
    """sglang PR#28468: a copy was evicted while a transfer read it."""
    chunk = make_chunk()
    with Store(tmp_path) as store:
        sessions = SessionStore(store)
        store.tier.write(*chunk.arguments)
        ids = chunk.identity.token_ids
        sessions.save("chat", chunk.identity.context, ids, [chunk.digest], len(ids))
        with store.tier.open(chunk.digest) as file:
            assert sessions.remove("chat").collected.chunks_removed == 1
            target = memoryview(bytearray(file.segment_bytes))
            file.read_into(2, [target])
        assert bytes(target) == chunk.payload(2)
