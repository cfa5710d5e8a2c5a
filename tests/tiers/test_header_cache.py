"""A header is taken for verified only when every byte of it is what was verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from chunks_and_faults import flip, make_chunk

from kvstrata.errors import DamagedError, Reason
from kvstrata.tiers.files import FileTier
from kvstrata.tiers.header_cache import HeaderCache


def test_a_file_that_is_opened_again_has_the_same_header(tmp_path: Path) -> None:
    tier, chunk = FileTier(tmp_path), make_chunk()
    tier.write(*chunk.arguments)
    with tier.open(chunk.digest) as first, tier.open(chunk.digest) as again:
        assert again.header is first.header


@pytest.mark.parametrize("byte", [0, 9, 40, 200, -1])
def test_no_changed_byte_of_a_header_is_overlooked(tmp_path: Path, byte: int) -> None:
    tier, chunk = FileTier(tmp_path), make_chunk()
    tier.write(*chunk.arguments)
    with tier.open(chunk.digest) as file:
        length = len(file.header.encode())
    flip(tier.path(chunk.digest), byte % length)
    with pytest.raises(DamagedError) as refusal:
        tier.open(chunk.digest)
    assert refusal.value.reason in (Reason.CHUNK_DAMAGED, Reason.CHUNK_TRUNCATED)


def test_a_file_that_was_cut_off_since_is_refused(tmp_path: Path) -> None:
    tier, chunk = FileTier(tmp_path), make_chunk()
    tier.write(*chunk.arguments)
    tier.open(chunk.digest).close()
    path = tier.path(chunk.digest)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError) as refusal:
        tier.open(chunk.digest)
    assert refusal.value.reason is Reason.CHUNK_TRUNCATED


def test_the_oldest_leave(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    chunks = [make_chunk(seed) for seed in range(3)]
    cache = HeaderCache(limit=2)
    for chunk in chunks:
        tier.write(*chunk.arguments)
        with tier.open(chunk.digest) as file:
            cache.keep(chunk.digest, file.header.encode(), file.header)
    sizes = [tier.path(chunk.digest).stat().st_size for chunk in chunks]
    starts = [tier.path(chunk.digest).read_bytes()[:4096] for chunk in chunks]
    found = [cache.find(chunk.digest, *each) for chunk, *each in zip(chunks, starts, sizes, strict=True)]
    assert [header is not None for header in found] == [False, True, True]
    cache.forget(chunks[1].digest)
    assert cache.find(chunks[1].digest, starts[1], sizes[1]) is None
