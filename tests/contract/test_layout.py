from __future__ import annotations

from typing import Any

import pytest

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError


def test_strides_of_a_known_geometry() -> None:
    layout = SegmentLayout(kv_heads=3, query_heads=9, head_dim=64, dtype="bfloat16")
    assert layout.query_group == 3
    assert layout.itemsize == 2
    assert layout.pages == 4
    assert layout.row_bytes == 2 * 3 * 64 * 2
    assert layout.plane_bytes == 64 * 64 * 2
    assert layout.page_bytes == 2 * 64 * 64 * 2
    assert layout.head_bytes == 256 * 2 * 64 * 2
    assert layout.segment_bytes == 3 * layout.head_bytes == 256 * layout.row_bytes
    assert [layout.segments(tokens) for tokens in (0, 1, 256, 257)] == [0, 1, 1, 2]


@pytest.mark.parametrize("head_dim", [1, 4, 12, 264])
def test_any_head_can_be_stored(head_dim: int) -> None:
    layout = SegmentLayout(kv_heads=2, query_heads=4, head_dim=head_dim, dtype="float16", chunk_tokens=8, page_tokens=4)
    assert layout.segment_bytes == 2 * 8 * 2 * head_dim * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_heads", 0),
        ("kv_heads", True),
        ("query_heads", 8),
        ("head_dim", 0),
        ("head_dim", 64.0),
        ("dtype", "int8"),
        ("chunk_tokens", 100),
        ("page_tokens", -1),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"kv_heads": 3, "query_heads": 9, "head_dim": 64, "dtype": "float32"}
    with pytest.raises(ConfigurationError, match=f"{field} must be .*{value!r}"):
        SegmentLayout(**{**fields, field: value})
