from __future__ import annotations

import pytest
import torch
from attention_reference import DTYPES, LEVELS, TOLERANCE, exact_attention, rows_of, table_of
from torch.profiler import ProfilerActivity, profile

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError
from kvstrata.kernels import (
    BlockTable,
    DecodeAttention,
    PrefillWorkspace,
    prefill,
    prefill_attention,
    prefill_workspace_bytes,
)

CASES = [(0, 1, 64), (0, 33, 64), (100, 5, 64), (257, 64, 2048), (1000, 200, 256), (64, 2, 1)]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("past", "rows", "piece"), CASES)
def test_matches_float64(
    dtype: str, past: int, rows: int, piece: int, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flash:
        monkeypatch.setattr(prefill, "_flash", lambda: None)
    layout = SegmentLayout(2, 6, 32, dtype)
    attention = DecodeAttention(layout, level=LEVELS[0])
    key, value, _ = rows_of(layout, past + rows)
    generator = torch.Generator().manual_seed(1)
    # As a projection leaves them: heads innermost.
    query = torch.randn(1, rows, 6, 32, generator=generator).to(key.dtype).transpose(1, 2)
    table = table_of(layout, past)
    attention.append(key[:, :, :past], value[:, :, :past], table, 0)
    out = prefill_attention(
        query,
        table,
        past,
        key[:, :, past:],
        value[:, :, past:],
        attention.scale,
        attention.gather,
        PrefillWorkspace(layout, rows + 3, piece),
    )
    assert out.shape == (1, rows, 6, 32)
    assert out.dtype == key.dtype
    assert out.is_contiguous()
    expected = exact_attention(query, key, value, attention.scale)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "past", "rows", "piece", "window"),
    [
        ((3, 9, 64), 4096, 512, 2048, None),
        ((2, 8, 128), 2048, 64, 512, None),
        ((3, 9, 64), 512, 900, 512, None),
        ((3, 9, 64), 4096, 512, 2048, 600),
        ((2, 4, 128), 2048, 256, 128, 257),
        ((3, 9, 64), 4096, 512, 2048, 128),
        ((8, 8, 64), 4096, 512, 512, 511),
    ],
)
def test_workspace_bytes_are_what_is_allocated(
    shape: tuple[int, int, int], past: int, rows: int, piece: int, window: int | None
) -> None:
    layout = SegmentLayout(*shape, "bfloat16")
    attention = DecodeAttention(layout, level=LEVELS[0])
    table = table_of(layout, past)
    rows_in = torch.zeros(1, shape[0], rows, shape[2], dtype=torch.bfloat16)
    query = torch.zeros(1, shape[1], rows, shape[2], dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        workspace = PrefillWorkspace(layout, rows, piece)
        prefill_attention(query, table, past, rows_in, rows_in, 1.0, attention.gather, workspace, window=window)
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    counted = prefill_workspace_bytes(layout, rows, piece, window)
    output = query.nbytes if window is not None and window < rows else 0  # held while the later rows are computed
    # Blocks of fewer rows than were counted need less.
    assert (0.95 if window is None else 0.9 if window >= rows else 0) * counted < peak <= counted + output


def test_misuse_is_refused_by_name() -> None:
    layout = SegmentLayout(1, 2, 16, "float32")
    attention = DecodeAttention(layout)
    workspace = PrefillWorkspace(layout, 4)
    table = BlockTable(layout)
    rows = torch.zeros(1, 1, 5, 16)
    query = torch.zeros(1, 2, 5, 16)
    with pytest.raises(ConfigurationError, match=r"query must be \(1, 2, 1..4, 16\), got \(1, 2, 5, 16\)"):
        prefill_attention(query, table, 0, rows, rows, 1.0, attention.gather, workspace)
    with pytest.raises(ConfigurationError, match="key_new and value_new must be"):
        prefill_attention(query[:, :, :4], table, 0, rows, rows, 1.0, attention.gather, workspace)
    four = rows[:, :, :4]
    with pytest.raises(ConfigurationError, match="past_tokens must be from 0 to 0, got 1"):
        prefill_attention(query[:, :, :4], table, 1, four, four, 1.0, attention.gather, workspace)
    with pytest.raises(ConfigurationError, match="piece_tokens must be at least 1, got 0"):
        prefill_workspace_bytes(layout, 1, 0)
