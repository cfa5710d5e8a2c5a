"""The arena's memory on the device that computes: plain host memory for a CPU, device memory with staging for CUDA.

The only file of this floor that imports PyTorch.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

import numpy as np
import torch

from kvstrata.contract.capability import DEVICE, Persistence, TierCapability, Visibility
from kvstrata.errors import Reason, UnsupportedError
from kvstrata.tiers.memory import HOST_MEMORY, Backing, HostBacking

__all__ = [
    "CudaBacking",
    "HostTensorBacking",
    "PinnedPool",
    "TensorBacking",
    "capabilities",
    "device_capability",
    "device_memory",
    "open_backing",
]


class TensorBacking(Backing, Protocol):
    """A backing whose slots kernels can read.

    stride: bytes a slot takes of the budget. whole: all slots, one after the other, as a uint8 tensor on the device.
    """

    stride: int
    whole: torch.Tensor

    def segment(self, slot: int) -> torch.Tensor:
        """The slot as a contiguous uint8 tensor on the device."""


class HostTensorBacking(HostBacking):
    """Host memory that the CPU's kernels read in place."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        super().__init__(slot_bytes, slots)
        assert self.memory is not None
        self.whole = torch.from_numpy(np.frombuffer(self.memory, np.uint8))
        self._tensors = [torch.from_numpy(np.frombuffer(view, np.uint8)) for view in self._views]

    def segment(self, slot: int) -> torch.Tensor:
        return self._tensors[slot]

    def close(self) -> None:
        self._tensors.clear()
        self.whole = self.whole[:0].clone()
        super().close()


class PinnedPool:
    """At most `buffers` pinned host buffers of `nbytes` each, made when first needed and reused. Thread-safe.

    Pinned memory is finite host state. When every buffer is out, `take` returns pageable memory, which copies slower
    and never waits for a buffer that nobody may give back.
    """

    def __init__(self, nbytes: int, buffers: int) -> None:
        self.nbytes = nbytes
        self.buffers = buffers
        self.made = 0
        self._free: list[torch.Tensor] = []
        self._pinned: set[int] = set()
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor:
        """A uint8 buffer, pinned while there are any; `put` it back once no copy uses it."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self.made < self.buffers:
                buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
                self.made += 1
                self._pinned.add(buffer.data_ptr())
                return buffer
        return torch.empty(self.nbytes, dtype=torch.uint8)

    def put(self, buffer: torch.Tensor) -> None:
        """Give a buffer back; pageable ones are dropped."""
        with self._lock:
            if buffer.data_ptr() in self._pinned:
                self._free.append(buffer)


class CudaBacking:
    """Device memory; bytes pass through pinned host memory on a stream for each direction.

    Not tested on hardware so far. A copy in waits for the kernels queued on the compute stream, so that a slot which
    changed hands is not overwritten under a kernel that still reads it; the compute stream waits for the event after
    the copy, so that no later kernel reads the slot before its bytes are there. A copy out waits for the compute
    stream too. staging: pinned buffers kept for both directions together.
    """

    def __init__(self, slot_bytes: int, slots: int, device: torch.device, staging: int = 8) -> None:
        self.slots = slots
        self.stride = -(-slot_bytes // 256) * 256
        self.whole = memory = torch.empty(self.stride * slots, dtype=torch.uint8, device=device)
        self._tensors = [memory[i * self.stride : i * self.stride + slot_bytes] for i in range(slots)]
        self._device = device
        self._to_device = torch.cuda.Stream(device)
        self._to_host = torch.cuda.Stream(device)
        self.staging = PinnedPool(slot_bytes, staging)
        self._filling: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def segment(self, slot: int) -> torch.Tensor:
        return self._tensors[slot]

    def readable(self, slot: int) -> memoryview:
        """A copy in pageable memory: a publisher holds many slots at once, more than there are pinned buffers."""
        buffer = self.staging.take()
        try:
            self._to_host.wait_stream(torch.cuda.default_stream(self._device))
            with torch.cuda.stream(self._to_host):
                buffer.copy_(self._tensors[slot], non_blocking=True)
                copied = self._to_host.record_event()
            copied.synchronize()
            return memoryview(buffer.numpy().tobytes())
        finally:
            self.staging.put(buffer)

    def writable(self, slot: int) -> memoryview:
        """The same buffer until `flush`, so that a slot which was begun and given up keeps no second one."""
        with self._lock:
            buffer = self._filling.get(slot)
            if buffer is None:
                buffer = self._filling[slot] = self.staging.take()
        return buffer.numpy().data

    def flush(self, slot: int) -> None:
        with self._lock:
            buffer = self._filling.pop(slot)
        compute = torch.cuda.default_stream(self._device)
        try:
            self._to_device.wait_stream(compute)
            with torch.cuda.stream(self._to_device):
                self._tensors[slot].copy_(buffer, non_blocking=True)
                copied = self._to_device.record_event()
            compute.wait_event(copied)
            copied.synchronize()
        finally:
            self.staging.put(buffer)

    def close(self) -> None:
        self._tensors.clear()
        self.whole = self.whole[:0].clone()
        self._filling.clear()


def open_backing(slot_bytes: int, slots: int, device: torch.device) -> TensorBacking:
    """Memory for `slots` slots on `device`. Errors: `UnsupportedError` for a device that is neither CPU nor CUDA."""
    if device.type == "cpu":
        return HostTensorBacking(slot_bytes, slots)
    if device.type == "cuda":
        return CudaBacking(slot_bytes, slots, device)
    raise UnsupportedError(Reason.MODEL_UNSUPPORTED, f"device {device} is not served", "move the model to CPU or CUDA")


def device_capability(device: torch.device) -> TierCapability:
    """What the memory of `device` can do. A CPU's is host memory, so that files are read straight into its slots."""
    on_host = device.type == "cpu"
    return TierCapability(
        DEVICE,
        "host" if on_host else str(device),
        kernel_readable=True,
        dma_source=True,
        dma_destination=True,
        persistence=Persistence.PROCESS,
        visibility=Visibility.WRITE if on_host else Visibility.STREAM_EVENT,
        partial_attention=True,
        alignment=4096 if on_host else 256,
    )


def capabilities(device: torch.device, *lower: TierCapability) -> dict[str, TierCapability]:
    """Records of the device's memory, the host's and the tiers below, by name."""
    return {each.tier: each for each in (device_capability(device), HOST_MEMORY, *lower)}


def device_memory(device: torch.device) -> int:
    """Bytes of memory that `device` has in all, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
