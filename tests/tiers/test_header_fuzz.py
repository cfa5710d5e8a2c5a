"""Whatever bytes a chunk file or a header holds, only our refusals come out, and nothing outside is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3
from chunks_and_faults import Chunk, make_chunk
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from kvstrata.errors import ConfigurationError, DamagedError
from kvstrata.tiers.chunk_format import Header
from kvstrata.tiers.files import FileTier

CHUNK = make_chunk(tokens=1)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tier = FileTier(tmp_path_factory.mktemp("tier"))
    tier.write(*CHUNK.arguments)
    return tier.path(CHUNK.digest).read_bytes()


def refuses(root: Path, content: bytes, chunk: Chunk = CHUNK) -> bool:
    """Whether `content` in the place of the chunk is refused; anything but a refusal raises."""
    tier = FileTier(root)
    tier.path(chunk.digest).parent.mkdir(parents=True, exist_ok=True)
    tier.path(chunk.digest).write_bytes(content)
    try:
        with tier.open(chunk.digest) as file:
            file.verify_payload()
    except DamagedError:
        return True
    return False


@settings(max_examples=200)
@given(content=st.binary(max_size=5000))
def test_noise_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("noise")
    assert refuses(root / "tier", content)
    assert [path.name for path in root.iterdir()] == ["tier"]


@settings(max_examples=300)
@given(data=st.data())
def test_a_changed_file_is_refused_or_reads_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, data: st.DataObject
) -> None:
    changed = bytearray(raw)
    start = data.draw(st.integers(0, len(raw) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=40))
    changed[start : start + len(patch)] = patch
    header_bytes = int.from_bytes(raw[24:28], "little")
    padding = range(header_bytes, -(-header_bytes // 4096) * 4096)
    same = bytes(changed) == raw
    only_padding = len(changed) == len(raw) and start in padding and start + len(patch) - 1 in padding
    refused = refuses(tmp_path_factory.mktemp("changed"), bytes(changed))
    assert refused is not (same or only_padding)


@settings(max_examples=300)
@given(data=st.data())
def test_a_header_with_right_checksums_and_wrong_content_is_refused(raw: bytes, data: st.DataObject) -> None:
    """An attacker can compute unkeyed checksums; the identity in the name still decides."""
    size = int.from_bytes(raw[24:28], "little")
    header = bytearray(raw[:size])
    start = data.draw(st.integers(16, size - 33))
    patch = data.draw(st.binary(min_size=1, max_size=16))[: size - 32 - start]
    header[start : start + len(patch)] = patch
    header[40:48] = xxh3_64_digest(bytes(header[:40]))
    header[-32:] = blake3(bytes(header[:-32])).digest()
    try:
        parsed = Header.parse(bytes(header), CHUNK.digest)
    except (DamagedError, ConfigurationError):
        return
    assert parsed.identity == CHUNK.identity
