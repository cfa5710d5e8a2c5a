"""The file tier gives back the bytes it was given, or says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import LAYERS, LAYOUT, FaultyFiles, flip, make_chunk, tree
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.identity import Namespace
from kvstrata.errors import ConfigurationError, DamagedError, Reason, StateError, StoreError
from kvstrata.tiers.chunk_format import ALIGNMENT, payload_key
from kvstrata.tiers.chunk_writer import read_back
from kvstrata.tiers.files import FileTier, OsFiles, WriteOutcome, payload_bytes


def buffers(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_was_written_is_read(tmp_path: Path, tokens: int, parts: int) -> None:
    chunk = make_chunk(tokens=tokens, parts=parts)
    tier = FileTier(tmp_path)
    receipt = tier.write(*chunk.arguments)
    assert receipt.outcome is WriteOutcome.WRITTEN
    assert receipt.payload_bytes == LAYERS * payload_bytes(LAYOUT, tokens)
    assert receipt.bytes == tier.path(chunk.digest).stat().st_size
    with tier.open(chunk.digest) as file:
        assert (file.identity, file.layout, file.layers, file.tokens) == (chunk.identity, LAYOUT, LAYERS, tokens)
        assert file.nbytes == receipt.payload_bytes
        for layer in range(LAYERS):
            pieces = buffers(*[file.segment_bytes // 4] * 4)
            assert file.read_into(layer, pieces) == file.segment_bytes
            assert b"".join(pieces) == chunk.payload(layer)
    assert tree(tmp_path / "tmp") == {}


def test_a_short_chunk_stores_only_its_used_pages() -> None:
    assert payload_bytes(LAYOUT, 1) == LAYOUT.kv_heads * LAYOUT.page_bytes
    assert payload_bytes(LAYOUT, LAYOUT.chunk_tokens) == LAYOUT.segment_bytes


def test_segments_are_aligned_for_ranged_reads(tmp_path: Path) -> None:
    chunk = make_chunk(tokens=70)
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    raw = tier.path(chunk.digest).read_bytes()
    with tier.open(chunk.digest) as file:
        for layer, entry in enumerate(file.header.segments):
            assert entry.offset % ALIGNMENT == 0
            assert raw[entry.offset : entry.offset + entry.length] == chunk.payload(layer)


@settings(max_examples=30)
@given(limit=st.integers(1, 20_000))
def test_short_reads_and_writes_change_nothing(tmp_path_factory: pytest.TempPathFactory, limit: int) -> None:
    chunk = make_chunk(parts=2)
    tier = FileTier(tmp_path_factory.mktemp("tier"), files=FaultyFiles(short=max(limit, 64)))
    assert tier.write(*chunk.arguments).outcome is WriteOutcome.WRITTEN
    with tier.open(chunk.digest) as file:
        first, second = buffers(100, file.segment_bytes - 100)
        file.read_into(1, [first, second])
        assert bytes(first) + bytes(second) == chunk.payload(1)


def test_writing_again_keeps_the_valid_file(tmp_path: Path) -> None:
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    before = tier.path(chunk.digest).stat().st_ino
    receipt = tier.write(*chunk.arguments)
    assert (receipt.outcome, receipt.bytes) == (WriteOutcome.ALREADY_PRESENT, 0)
    assert tier.path(chunk.digest).stat().st_ino == before


@pytest.mark.parametrize("byte", [20, 5000])
def test_writing_over_a_damaged_file_replaces_it(tmp_path: Path, byte: int) -> None:
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    flip(tier.path(chunk.digest), byte)
    assert tier.write(*chunk.arguments).outcome is WriteOutcome.REPLACED
    with tier.open(chunk.digest) as file:
        file.verify_payload()
    assert len(tree(tmp_path / "damaged")) == 1


def test_another_layout_of_the_same_chunk_replaces_the_file(tmp_path: Path) -> None:
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    coarse = replace(LAYOUT, page_tokens=128)
    assert tier.write(chunk.identity, coarse, chunk.segments).outcome is WriteOutcome.REPLACED
    with tier.open(chunk.digest) as file:
        assert file.layout == coarse
    assert tree(tmp_path / "damaged") == {}


def test_a_chunk_that_is_not_there_is_missing(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    assert not tier.has(b"\x01" * 32)
    assert list(tier.list()) == []
    assert not tier.revoke(b"\x02" * 32)
    with pytest.raises(DamagedError) as refusal:
        tier.open(b"\x01" * 32)
    assert refusal.value.reason is Reason.CHUNK_MISSING
    assert refusal.value.chunk == "01" * 32


def test_listing_gives_published_chunks_only(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    chunks = {make_chunk(seed).digest for seed in range(3) if tier.write(*make_chunk(seed).arguments)}
    shard = tier.path(next(iter(chunks))).parent
    (shard / "notes.txt").write_text("not a chunk")
    (tmp_path / "tmp" / "half").write_text("not published")
    assert set(tier.list()) == chunks


def test_a_revoked_chunk_is_no_hit_until_it_is_written_anew(tmp_path: Path) -> None:
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    assert tier.revoke(chunk.digest)
    assert not tier.has(chunk.digest)
    assert list(tier.list()) == []
    assert tier.write(*chunk.arguments).outcome is WriteOutcome.WRITTEN
    assert tier.has(chunk.digest)


def test_only_the_latest_damaged_files_are_kept(tmp_path: Path) -> None:
    chunk = make_chunk(tokens=1)
    tier = FileTier(tmp_path)
    for _ in range(20):
        tier.write(*chunk.arguments)
        tier.revoke(chunk.digest)
    assert len(tree(tmp_path / "damaged")) == 16


def test_where_a_file_cannot_be_moved_it_is_still_not_read_again(tmp_path: Path) -> None:
    chunk = make_chunk()
    FileTier(tmp_path).write(*chunk.arguments)
    before = tree(tmp_path)
    tier = FileTier(tmp_path, read_only=True)
    assert tier.has(chunk.digest)
    assert tier.revoke(chunk.digest)
    assert not tier.has(chunk.digest)
    assert list(tier.list()) == []
    with pytest.raises(DamagedError) as refusal:
        tier.open(chunk.digest)
    assert refusal.value.reason is Reason.CHUNK_MISSING
    assert tree(tmp_path) == before


def test_a_read_only_tier_refuses_writes(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as refusal:
        FileTier(tmp_path, read_only=True).write(*make_chunk().arguments)
    assert refusal.value.reason is Reason.STORE_READ_ONLY
    assert tree(tmp_path) == {}


def test_a_file_that_could_not_be_moved_aside_is_replaced_in_place(tmp_path: Path) -> None:
    chunk = make_chunk()
    files = FaultyFiles()
    tier = FileTier(tmp_path, files=files)
    tier.write(*chunk.arguments)
    flip(tier.path(chunk.digest), 5000)
    plain = tier._files.replace

    def cannot_move_aside(source: Path, target: Path) -> None:
        if target.parent.name == "damaged":
            raise PermissionError(1, "no")
        plain(source, target)

    files.replace = cannot_move_aside  # type: ignore[attr-defined]
    assert tier.write(*chunk.arguments).outcome is WriteOutcome.REPLACED
    assert tier.has(chunk.digest)
    with tier.open(chunk.digest) as file:
        file.verify_payload()


def test_without_hard_links_the_chunk_is_still_published(tmp_path: Path) -> None:
    chunk = make_chunk()
    tier = FileTier(tmp_path, files=FaultyFiles(named={"link": 95}))
    assert tier.write(*chunk.arguments).outcome is WriteOutcome.WRITTEN
    assert tree(tmp_path / "tmp") == {}
    with tier.open(chunk.digest) as file:
        file.verify_payload()


def test_a_durable_tier_syncs_the_file_before_and_the_directory_after_publishing(tmp_path: Path) -> None:
    files = FaultyFiles()
    FileTier(tmp_path, files=files, durable=True).write(*make_chunk().arguments)
    order = [call for call in files.calls if call in {"fdatasync", "link", "sync_directory"}]
    assert order == ["fdatasync", "link", "sync_directory", "sync_directory"]


def test_a_source_that_changes_while_it_is_written_is_not_published(tmp_path: Path) -> None:
    chunk = make_chunk()
    backing = bytearray(chunk.payload(0))
    chunk.segments[0] = [memoryview(backing)]
    files = FaultyFiles()
    real = files.allocate

    def change(fd: int, length: int) -> None:
        real(fd, length)
        backing[0] ^= 1

    files.allocate = change  # type: ignore[attr-defined]
    tier = FileTier(tmp_path, files=files)
    with pytest.raises(StoreError) as refusal:
        tier.write(*chunk.arguments)
    assert refusal.value.reason is Reason.STORE_IO
    assert not tier.has(chunk.digest)
    assert tree(tmp_path) == {}


def _fewer_layers(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*arguments[:2], arguments[2][:-1])


def _short_buffer(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*arguments[:2], [[layer[0][:-1]] for layer in arguments[2]])


def _strided(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*arguments[:2], [[memoryview(bytearray(2 * layer[0].nbytes))[::2]] for layer in arguments[2]])


def _other_chunk_size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (arguments[0], replace(LAYOUT, chunk_tokens=256), arguments[2])


@pytest.mark.parametrize("spoil", [_fewer_layers, _short_buffer, _strided, _other_chunk_size])
def test_segments_that_do_not_fit_are_refused(tmp_path: Path, spoil: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        FileTier(tmp_path).write(*spoil(make_chunk().arguments))
    assert refusal.value.reason is Reason.INVALID_ARGUMENT
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(("layer", "missing"), [(-1, 0), (LAYERS, 0), (0, 1), (0, -1)])
def test_reads_that_do_not_fit_are_refused_before_anything_is_overwritten(
    tmp_path: Path, layer: int, missing: int
) -> None:
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    with tier.open(chunk.digest) as file:
        target = buffers(file.segment_bytes - missing)
        with pytest.raises(ConfigurationError, match="buffers of"):
            file.read_into(layer, target)
        assert not any(target[0])


def test_a_closed_file_refuses_reads(tmp_path: Path) -> None:
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    file = tier.open(chunk.digest)
    file.close()
    file.close()
    with pytest.raises(StateError) as refusal:
        file.read_into(0, buffers(file.segment_bytes))
    assert refusal.value.reason is Reason.CLOSED


def test_closing_waits_for_the_read_under_way(tmp_path: Path) -> None:
    """The descriptor's number may be reused at once, so it must not be given back while a thread reads from it."""
    chunk = make_chunk()
    files = FaultyFiles()
    tier = FileTier(tmp_path, files=files)
    tier.write(*chunk.arguments)
    file = tier.open(chunk.digest)
    entered, proceed = threading.Event(), threading.Event()
    real = files.preadv

    def slow(fd: int, pieces: list[memoryview], offset: int) -> int:
        entered.set()
        assert proceed.wait(30)
        return int(real(fd, pieces, offset))

    files.preadv = slow  # type: ignore[attr-defined]
    target = buffers(file.segment_bytes)
    reader = threading.Thread(target=file.read_into, args=(2, target))
    reader.start()
    assert entered.wait(30)
    closes = files.calls.count("close")
    file.close()
    assert files.calls.count("close") == closes
    proceed.set()
    reader.join(30)
    assert bytes(target[0]) == chunk.payload(2)
    assert files.calls.count("close") == closes + 1


def test_many_threads_read_one_file(tmp_path: Path) -> None:
    chunk = make_chunk()
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    wrong: list[int] = []
    with tier.open(chunk.digest) as file:

        def read(layer: int) -> None:
            for _ in range(50):
                target = buffers(file.segment_bytes)
                file.read_into(layer, target)
                if bytes(target[0]) != chunk.payload(layer):
                    wrong.append(layer)

        threads = [threading.Thread(target=read, args=(index % LAYERS,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_equal_rows_of_two_tenants_have_unequal_payload_digests(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    digests = set()
    for namespace in (Namespace("a"), Namespace("b"), Namespace("a", "salt")):
        chunk = make_chunk(namespace=namespace)
        tier.write(*chunk.arguments)
        with tier.open(chunk.digest) as file:
            digests.add(file.header.payload_digest)
            assert file.verify_payload().bytes == file.nbytes
    assert len(digests) == 3
    assert payload_key(Namespace("a")) != payload_key(Namespace("b"))


def test_receipts_take_their_seconds_from_the_clock(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    receipt = FileTier(tmp_path, clock=lambda: float(next(ticks))).write(*make_chunk().arguments)
    assert (receipt.checksum_seconds, receipt.write_seconds, receipt.validate_seconds) == (1.0, 3.0, 1.0)


def test_the_durable_half_imports_without_pytorch() -> None:
    code = (
        "import sys, kvstrata.store, kvstrata.store.store, kvstrata.sessions, kvstrata.tiers.files;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_header_that_was_written_is_held_to_its_bytes(tmp_path: Path) -> None:
    """A sound header of the same chunk that says anything else is not the one that was written."""
    tier = FileTier(tmp_path)
    chunk = make_chunk()
    tier.write(*chunk.arguments)
    path = tier.path(chunk.digest)
    with tier.open(chunk.digest) as file:
        header = file.header
    with path.open("rb") as file:
        read_back(OsFiles(), file.fileno(), header)
        with pytest.raises(ValueError, match="not the one that was written"):
            read_back(OsFiles(), file.fileno(), replace(header, payload_digest=bytes(32)))


def test_a_shard_reaches_the_disk_before_its_first_chunk_is_published(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = FileTier(tmp_path, durable=True, files=files)
    first = make_chunk(0)
    second = next(chunk for chunk in map(make_chunk, range(1, 5000)) if chunk.digest[0] == first.digest[0])
    for chunk, syncs in ((first, 2), (second, 3)):
        tier.write(*chunk.arguments)
        assert files.calls.count("sync_directory") == syncs
    shutil.rmtree(tmp_path / "chunks")
    tier.write(*first.arguments)
    assert files.calls.count("sync_directory") == 5
