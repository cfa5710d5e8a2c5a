"""How the K and V rows of one (chunk, layer) lie in memory.

A segment is stored ``[kv_head][page][plane: K then V][token in page][head_dim]``. The two planes of a page lie
together, so a page of one head is one contiguous read, and every head and every page sits at a constant stride.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.errors import ConfigurationError, Reason

__all__ = ["ITEM_SIZES", "SegmentLayout"]

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the cache dtypes that a segment may hold."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Geometry of one segment: the K and V rows of `chunk_tokens` positions of one layer.

    `kv_heads` and `query_heads` are head counts, `head_dim` is in elements, `chunk_tokens` and `page_tokens` in tokens.
    `dtype` is ``float32``, ``bfloat16`` or ``float16``. A geometry that cannot be stored raises `ConfigurationError`.
    """

    kv_heads: int
    query_heads: int
    head_dim: int
    dtype: str
    chunk_tokens: int = 256
    page_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("kv_heads", "query_heads", "head_dim", "chunk_tokens", "page_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _invalid(f"{name} must be an int of at least 1, got {value!r}")
        if self.dtype not in ITEM_SIZES:
            raise _invalid(f"dtype must be one of {', '.join(ITEM_SIZES)}, got {self.dtype!r}")
        if self.query_heads % self.kv_heads:
            raise _invalid(f"query_heads must be a multiple of kv_heads ({self.kv_heads}), got {self.query_heads}")
        if self.chunk_tokens % self.page_tokens:
            raise _invalid(
                f"chunk_tokens must be a multiple of page_tokens ({self.page_tokens}), got {self.chunk_tokens}"
            )

    @property
    def query_group(self) -> int:
        """Query heads that share one K/V head."""
        return self.query_heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEM_SIZES[self.dtype]

    @property
    def pages(self) -> int:
        """Pages per head in one segment."""
        return self.chunk_tokens // self.page_tokens

    @property
    def row_bytes(self) -> int:
        """Bytes of the K and V rows of one token over all K/V heads."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane (K or V) of one page of one head."""
        return self.page_tokens * self.head_dim * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one head, K and V together."""
        return 2 * self.plane_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes from the start of one head to the start of the next."""
        return self.pages * self.page_bytes

    @property
    def segment_bytes(self) -> int:
        """Bytes of the whole segment."""
        return self.kv_heads * self.head_bytes

    def segments(self, tokens: int) -> int:
        """Segments that `tokens` tokens need, the last one possibly part filled."""
        return -(-tokens // self.chunk_tokens)


def _invalid(cause: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, cause)
