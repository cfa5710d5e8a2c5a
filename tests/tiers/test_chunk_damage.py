"""Every kind of damage to a chunk file is refused, and named for what it is."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
from chunks_and_faults import Chunk, FaultyFiles, flip, make_chunk, tree
from xxhash import xxh3_64_digest

from kvstrata.contract.identity import Namespace
from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.tiers.chunk_format import PREFIX_BYTES, Header
from kvstrata.tiers.files import FileTier


@pytest.fixture
def chunk() -> Chunk:
    return make_chunk(tokens=70)


@pytest.fixture
def tier(tmp_path: Path, chunk: Chunk) -> FileTier:
    tier = FileTier(tmp_path)
    tier.write(*chunk.arguments)
    return tier


def header_of(tier: FileTier, chunk: Chunk) -> Header:
    with tier.open(chunk.digest) as file:
        return file.header


def refusal(tier: FileTier, digest: bytes) -> DamagedError | None:
    """What opening and reading everything ends in."""
    found = None
    try:
        with tier.open(digest) as file:
            file.verify_payload()
    except DamagedError as error:
        found = error
    assert found is None or (found.chunk == digest.hex() and found.next_step)
    return found


def test_a_flipped_bit_anywhere_in_the_header_is_damage(tier: FileTier, chunk: Chunk) -> None:
    path = tier.path(chunk.digest)
    sound = path.read_bytes()
    length = len(header_of(tier, chunk).encode())
    wrong = []
    for byte in [*range(64), *range(64, length, 5), *range(length - 64, length)]:
        path.write_bytes(sound)
        flip(path, byte, byte % 8)
        error = refusal(tier, chunk.digest)
        if error is None or error.reason is not Reason.CHUNK_DAMAGED:
            wrong.append((byte, error))
    assert wrong == []


def test_a_flipped_bit_of_any_segment_is_damage_at_both_ends(tier: FileTier, chunk: Chunk) -> None:
    path = tier.path(chunk.digest)
    sound = path.read_bytes()
    for entry in header_of(tier, chunk).segments:
        for byte in (entry.offset, entry.offset + entry.length // 2, entry.offset + entry.length - 1):
            path.write_bytes(sound)
            flip(path, byte, byte % 8)
            error = refusal(tier, chunk.digest)
            assert error is not None
            assert error.reason is Reason.CHUNK_DAMAGED


def test_damage_of_one_layer_leaves_the_others_readable(tier: FileTier, chunk: Chunk) -> None:
    flip(tier.path(chunk.digest), header_of(tier, chunk).segments[1].offset)
    with tier.open(chunk.digest) as file:
        target = [memoryview(bytearray(file.segment_bytes))]
        file.read_into(0, target)
        assert bytes(target[0]) == chunk.payload(0)
        with pytest.raises(DamagedError, match="layer 1"):
            file.read_into(1, target)


def test_a_file_cut_off_anywhere_is_truncated(tier: FileTier, chunk: Chunk) -> None:
    path = tier.path(chunk.digest)
    header = header_of(tier, chunk)
    length = len(header.encode())
    places = {0, 1, 11, 12, 15, 16, PREFIX_BYTES - 1, PREFIX_BYTES, length - 1, length, header.file_bytes - 1}
    for entry in header.segments:
        places |= {entry.offset - 1, entry.offset, entry.offset + 1, entry.offset + entry.length - 1}
    sound = path.read_bytes()
    for place in sorted(places):
        path.write_bytes(sound[:place])
        error = refusal(tier, chunk.digest)
        assert error is not None, place
        assert error.reason is Reason.CHUNK_TRUNCATED, (place, error)


def test_a_file_cut_off_while_it_is_open_is_truncated(tier: FileTier, chunk: Chunk) -> None:
    with tier.open(chunk.digest) as file:
        os.truncate(tier.path(chunk.digest), file.header.segments[2].offset + 10)
        with pytest.raises(DamagedError) as error:
            file.read_into(2, [memoryview(bytearray(file.segment_bytes))])
    assert error.value.reason is Reason.CHUNK_TRUNCATED


def test_trailing_bytes_are_damage(tier: FileTier, chunk: Chunk) -> None:
    with tier.path(chunk.digest).open("ab") as file:
        file.write(b"\0")
    error = refusal(tier, chunk.digest)
    assert error is not None
    assert error.reason is Reason.CHUNK_DAMAGED


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"{}" * 3000, os.urandom(5000)])
def test_a_file_of_something_else_is_not_a_chunk(tier: FileTier, chunk: Chunk, content: bytes) -> None:
    tier.path(chunk.digest).write_bytes(content)
    error = refusal(tier, chunk.digest)
    assert error is not None
    assert error.reason is (Reason.CHUNK_DAMAGED if content else Reason.CHUNK_TRUNCATED)


@pytest.mark.parametrize("namespace", [Namespace("default"), Namespace("other")])
def test_a_chunk_under_another_name_is_foreign(tier: FileTier, chunk: Chunk, namespace: Namespace) -> None:
    """A short name that collides, or a file somebody copied, never brings the rows of another chunk or tenant."""
    other = make_chunk(seed=9, tokens=70, namespace=namespace)
    tier.write(*other.arguments)
    shutil.copy(tier.path(other.digest), tier.path(chunk.digest))
    error = refusal(tier, chunk.digest)
    assert error is not None
    assert error.reason is Reason.CHUNK_FOREIGN
    assert other.digest.hex() in error.cause


def test_segments_of_another_chunk_do_not_pass(tier: FileTier, chunk: Chunk) -> None:
    """Right length, sound in themselves, wrong place."""
    path = tier.path(chunk.digest)
    raw = bytearray(path.read_bytes())
    first, second, _ = header_of(tier, chunk).segments
    raw[first.offset : first.offset + first.length] = raw[second.offset : second.offset + second.length]
    path.write_bytes(raw)
    error = refusal(tier, chunk.digest)
    assert error is not None
    assert error.reason is Reason.CHUNK_DAMAGED


def _as_version(raw: bytes, version: int) -> bytes:
    start = raw[:8] + struct.pack("<I", version)
    return start + xxh3_64_digest(start)[:4] + raw[16:]


def test_a_newer_format_is_told_apart_from_damage_and_never_destroyed(tier: FileTier, chunk: Chunk) -> None:
    path = tier.path(chunk.digest)
    newer = _as_version(path.read_bytes(), 2)
    path.write_bytes(newer)
    error = refusal(tier, chunk.digest)
    assert error is not None
    assert error.reason is Reason.CHUNK_FORMAT_NEWER
    with pytest.raises(DamagedError) as refused:
        tier.write(*chunk.arguments)
    assert refused.value.reason is Reason.CHUNK_FORMAT_NEWER
    assert path.read_bytes() == newer


def test_a_format_before_the_first_is_damage(tier: FileTier, chunk: Chunk) -> None:
    path = tier.path(chunk.digest)
    path.write_bytes(_as_version(path.read_bytes(), 0))
    error = refusal(tier, chunk.digest)
    assert error is not None
    assert error.reason is Reason.CHUNK_DAMAGED


@pytest.mark.parametrize("call", ["open", "size", "preadv"])
def test_a_disk_that_fails_is_no_damage(tier: FileTier, chunk: Chunk, call: str) -> None:
    """The bytes may be sound: nothing is revoked, and the next attempt may succeed."""
    before = tree(tier.root)
    failing = FileTier(tier.root, files=FaultyFiles(named={call: 5}))
    with pytest.raises(StoreError) as error:
        failing.open(chunk.digest)
    assert not isinstance(error.value, DamagedError)
    assert error.value.reason is Reason.STORE_IO
    assert tree(tier.root) == before
    assert refusal(tier, chunk.digest) is None


def test_a_disk_that_fails_in_the_middle_is_no_damage(tier: FileTier, chunk: Chunk) -> None:
    files = FaultyFiles()
    with FileTier(tier.root, files=files).open(chunk.digest) as file:
        files.named["preadv"] = 5
        with pytest.raises(StoreError) as error:
            file.read_into(0, [memoryview(bytearray(file.segment_bytes))])
    assert error.value.reason is Reason.STORE_IO
