"""Slots as tensors: the same bytes as the views that readers fill, on the device that computes."""

from __future__ import annotations

import pytest
import torch

from kvstrata.errors import Reason, UnsupportedError
from kvstrata.tiers.device import CudaBacking, HostTensorBacking, open_backing

SIZE = 6000


def test_a_tensor_and_its_view_are_the_same_bytes() -> None:
    backing = open_backing(SIZE, 3, torch.device("cpu"))
    assert isinstance(backing, HostTensorBacking)
    assert (backing.slots, backing.stride) == (3, 8192)
    for slot in range(3):
        tensor = backing.segment(slot)
        assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (torch.uint8, (SIZE,), True)
        assert tensor.data_ptr() % 4096 == 0
        backing.writable(slot)[:] = bytes([slot + 7]) * SIZE
        backing.flush(slot)
        assert (tensor == slot + 7).all()
        tensor.fill_(slot + 1)
    for slot in range(3):
        assert bytes(backing.readable(slot)) == bytes([slot + 1]) * SIZE


def test_a_tensor_outlives_the_backing() -> None:
    """A kernel that still reads reads its own bytes."""
    backing = HostTensorBacking(SIZE, 2)
    tensor = backing.segment(1)
    tensor.fill_(9)
    backing.close()
    assert (tensor == 9).all()


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError) as refusal:
        open_backing(SIZE, 1, torch.device("meta"))
    assert refusal.value.reason is Reason.MODEL_UNSUPPORTED
    assert "meta" in refusal.value.cause


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_by_way_of_staging() -> None:
    backing = open_backing(SIZE, 2, torch.device("cuda"))
    assert isinstance(backing, CudaBacking)
    backing.writable(1)[:] = b"\x05" * SIZE
    assert backing.segment(1).device.type == "cuda"
    backing.flush(1)
    assert (backing.segment(1) == 5).all()
    assert bytes(backing.readable(1)) == b"\x05" * SIZE
    backing.close()
