"""The bytes of a segment as they travel: whole for a full chunk, the used pages of every head for a short one."""

from __future__ import annotations

from kvstrata.contract.layout import SegmentLayout

__all__ = ["sealed_pages", "used_pages"]


def used_pages(segment: memoryview, layout: SegmentLayout, tokens: int) -> list[memoryview]:
    """Views of `segment` whose concatenation is the payload of a chunk of `tokens` tokens."""
    if tokens == layout.chunk_tokens:
        return [segment]
    used = -(-tokens // layout.page_tokens) * layout.page_bytes
    starts = range(0, layout.segment_bytes, layout.head_bytes)
    return [segment[start : start + used] for start in starts]


def sealed_pages(segment: memoryview, layout: SegmentLayout, tokens: int) -> list[memoryview]:
    """As `used_pages`, with the rows behind `tokens` as zeros: what a tail slot holds there is nobody's history.

    Copies the last page of every head where it is not full, and nothing else.
    """
    views = used_pages(segment, layout, tokens)
    filled = tokens % layout.page_tokens
    if tokens == layout.chunk_tokens or not filled:
        return views
    row = layout.head_dim * layout.itemsize
    result = []
    for view in views:
        page = bytearray(view[-layout.page_bytes :])
        for plane in range(2):
            start = plane * layout.plane_bytes
            page[start + filled * row : start + layout.plane_bytes] = bytes((layout.page_tokens - filled) * row)
        result += [view[: -layout.page_bytes], memoryview(page)]
    return [view for view in result if view.nbytes]
