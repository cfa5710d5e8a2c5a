"""What travels of a segment: its used pages, in the order of the file, and nothing of a former owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.layout import SegmentLayout
from kvstrata.store.buffers import sealed_pages, used_pages
from kvstrata.tiers.files import payload_bytes

LAYOUT = SegmentLayout(kv_heads=2, query_heads=4, head_dim=8, dtype="bfloat16", chunk_tokens=192)
TOKENS = st.integers(1, LAYOUT.chunk_tokens)


def marked() -> bytearray:
    """Every row holds its own (head, plane, position), so that each byte says where it belongs."""
    data = bytearray()
    for head in range(LAYOUT.kv_heads):
        for page in range(LAYOUT.pages):
            for plane in range(2):
                for row in range(LAYOUT.page_tokens):
                    mark = bytes([1 + head, 1 + plane, page * LAYOUT.page_tokens + row, 7])
                    data += mark * (LAYOUT.head_dim * LAYOUT.itemsize // 4)
    return data


def rows_in(payload: bytes, tokens: int) -> dict[tuple[int, int, int], bytes]:
    """Rows of a payload by (head, plane, position), read as the format says."""
    size, pages = LAYOUT.head_dim * LAYOUT.itemsize, -(-tokens // LAYOUT.page_tokens)
    result, at = {}, 0
    for head in range(LAYOUT.kv_heads):
        for page in range(pages):
            for plane in range(2):
                for row in range(LAYOUT.page_tokens):
                    result[head, plane, page * LAYOUT.page_tokens + row] = payload[at : at + size]
                    at += size
    assert at == len(payload)
    return result


@given(TOKENS)
def test_used_pages_are_the_payload(tokens: int) -> None:
    views = used_pages(memoryview(marked()), LAYOUT, tokens)
    payload = b"".join(views)
    assert len(payload) == payload_bytes(LAYOUT, tokens)
    for (head, plane, position), row in rows_in(payload, tokens).items():
        assert row[:4] == bytes([1 + head, 1 + plane, position, 7])


@given(TOKENS)
def test_sealed_pages_hold_no_row_behind_the_last(tokens: int) -> None:
    source = marked()
    views = sealed_pages(memoryview(source), LAYOUT, tokens)
    assert all(view.nbytes for view in views)
    payload = b"".join(views)
    assert len(payload) == payload_bytes(LAYOUT, tokens)
    for (head, plane, position), row in rows_in(payload, tokens).items():
        expected = bytes([1 + head, 1 + plane, position, 7]) if position < tokens else bytes(4)
        assert row[:4] == expected
        assert row[-4:] == expected
    assert source == marked()


@pytest.mark.parametrize("tokens", [64, 128, 192])
def test_whole_pages_are_not_copied(tokens: int) -> None:
    source = marked()
    views = sealed_pages(memoryview(source), LAYOUT, tokens)
    source[0] = 99
    assert views[0][0] == 99
    assert len(views) == (1 if tokens == 192 else LAYOUT.kv_heads)


def test_used_pages_write_through() -> None:
    target = bytearray(LAYOUT.segment_bytes)
    for view in used_pages(memoryview(target), LAYOUT, 65):
        view[:] = b"\x01" * view.nbytes
    assert sum(target) == payload_bytes(LAYOUT, 65)
