from __future__ import annotations

import ctypes

import pytest
import torch

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError
from kvstrata.kernels import BlockTable

LAYOUT = SegmentLayout(1, 1, 8, "float32", chunk_tokens=64)


def _slot() -> torch.Tensor:
    return torch.empty(LAYOUT.segment_bytes, dtype=torch.uint8)


def test_addresses_follow_the_segments() -> None:
    table = BlockTable(LAYOUT)
    slots = [_slot() for _ in range(40)]
    for slot in slots:
        table.append(slot)
    table.set(3, slots[7])
    slots[3] = slots[7]
    table.truncate(30)
    assert len(table) == 30
    assert table.capacity == 30 * 64
    addresses = (ctypes.c_uint64 * 30).from_address(table.pointer)
    assert list(addresses) == [slot.data_ptr() for slot in slots[:30]]
    table.append(slots[39])
    assert (ctypes.c_uint64 * 31).from_address(table.pointer)[30] == slots[39].data_ptr()


def test_slots_that_cannot_hold_a_segment_are_refused() -> None:
    table = BlockTable(LAYOUT)
    with pytest.raises(ConfigurationError, match=r"segment must hold 4096 bytes, got 4095"):
        table.append(_slot()[1:])
    with pytest.raises(ConfigurationError, match="contiguous one-dimensional uint8"):
        table.append(_slot().view(torch.float32))
    with pytest.raises(ConfigurationError, match="multiple of 4 bytes"):
        table.append(torch.empty(LAYOUT.segment_bytes + 1, dtype=torch.uint8)[1:])
    with pytest.raises(ConfigurationError, match="index must be from 0 to 0, got 1"):
        table.set(1, _slot())
    with pytest.raises(ConfigurationError, match="length must be from 0 to 0, got -1"):
        table.truncate(-1)


@pytest.mark.parametrize("head_dim", [4, 12, 264])
def test_a_head_that_the_vectors_do_not_fit_is_refused(head_dim: int) -> None:
    with pytest.raises(ConfigurationError, match=f"head_dim must be a multiple of 8 from 8 to 256 .*got {head_dim}"):
        BlockTable(SegmentLayout(1, 1, head_dim, "float32"))
