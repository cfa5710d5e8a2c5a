"""Slots as tensors: the same bytes as the views that readers fill, on the device that computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstrata.errors import Reason, UnsupportedError
from kvstrata.tiers.device import CudaBacking, HostTensorBacking, PinnedPool, open_backing

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


class FakeCuda:
    """Streams and events that write down what they are asked, in order. Copies happen at once, on the host."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.streams = 0
        self.compute = FakeStream(self, "compute")
        self.pinned = 0

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 - as in torch.cuda
        self.streams += 1
        return FakeStream(self, f"stream {self.streams}")

    def default_stream(self, device: torch.device) -> FakeStream:
        return self.compute

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.said.append(f"on {stream.name}")
        yield


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeStream) -> None:
        self.cuda.said.append(f"{self.name} waits for the event of {event.name}")

    def record_event(self) -> FakeStream:
        self.cuda.said.append(f"event of {self.name}")
        return self

    def synchronize(self) -> None:
        self.cuda.said.append(f"host waits for the event of {self.name}")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda, empty = FakeCuda(), torch.empty

    def counted(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        cuda.pinned += pin_memory
        return empty(*arguments, **options)

    for name in ("Stream", "default_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch, "empty", counted)
    return cuda


def test_copies_are_ordered_with_the_kernels(fake_cuda: FakeCuda) -> None:
    """In: not under a kernel that still reads the slot, and before any that is queued later. Out: after the kernels."""
    backing = CudaBacking(SIZE, 2, torch.device("cpu"))
    backing.writable(1)[:] = b"\x07" * SIZE
    assert fake_cuda.said == []
    backing.flush(1)
    assert fake_cuda.said == [
        "stream 1 waits for compute",
        "on stream 1",
        "event of stream 1",
        "compute waits for the event of stream 1",
        "host waits for the event of stream 1",
    ]
    fake_cuda.said.clear()
    assert bytes(backing.readable(1)) == b"\x07" * SIZE
    assert fake_cuda.said == [
        "stream 2 waits for compute",
        "on stream 2",
        "event of stream 2",
        "host waits for the event of stream 2",
    ]
    backing.close()


def test_staging_is_bounded_and_reused(fake_cuda: FakeCuda) -> None:
    backing = CudaBacking(SIZE, 6, torch.device("cpu"), staging=2)
    for turn in range(4):
        views = [backing.writable(slot) for slot in range(5)]
        for slot, view in enumerate(views):
            view[:] = bytes([turn + slot]) * SIZE
        for slot in range(5):
            backing.flush(slot)
        kept = [backing.readable(slot) for slot in range(5)]
        assert [bytes(view) for view in kept] == [bytes([turn + slot]) * SIZE for slot in range(5)]
    assert (backing.staging.made, fake_cuda.pinned) == (2, 2)


def test_a_slot_that_was_begun_keeps_its_buffer(fake_cuda: FakeCuda) -> None:
    backing = CudaBacking(SIZE, 2, torch.device("cpu"), staging=1)
    for _ in range(3):
        backing.writable(0)[:1] = b"x"
    backing.flush(0)
    backing.writable(1)
    assert fake_cuda.pinned == 1


def test_a_pool_gives_pageable_memory_when_it_is_empty(fake_cuda: FakeCuda) -> None:
    pool = PinnedPool(SIZE, 1)
    first, second = pool.take(), pool.take()
    assert (first.numel(), second.numel(), fake_cuda.pinned) == (SIZE, SIZE, 1)
    pool.put(second)
    pool.put(first)
    assert pool.take().data_ptr() == first.data_ptr()
