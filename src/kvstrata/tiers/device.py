"""The arena's memory on the device that computes: plain host memory for a CPU, device memory with staging for CUDA.

The only file of this floor that imports PyTorch.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

import numpy as np
import torch

from kvstrata.errors import Reason, UnsupportedError
from kvstrata.tiers.memory import Backing, HostBacking

__all__ = ["CudaBacking", "HostTensorBacking", "TensorBacking", "device_memory", "open_backing"]


class TensorBacking(Backing, Protocol):
    """A backing whose slots kernels can read.

    stride: bytes a slot takes of the budget.
    """

    stride: int

    def segment(self, slot: int) -> torch.Tensor:
        """The slot as a contiguous uint8 tensor on the device."""


class HostTensorBacking(HostBacking):
    """Host memory that the CPU's kernels read in place."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        super().__init__(slot_bytes, slots)
        self._tensors = [torch.from_numpy(np.frombuffer(view, np.uint8)) for view in self._views]

    def segment(self, slot: int) -> torch.Tensor:
        return self._tensors[slot]

    def close(self) -> None:
        self._tensors.clear()
        super().close()


class CudaBacking:
    """Device memory; bytes pass through pinned host memory on a stream of their own.

    Not tested on hardware so far. `flush` first waits for the kernels queued on the default stream, so that a slot
    which changed hands is not overwritten under a kernel that still reads it.
    """

    def __init__(self, slot_bytes: int, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.stride = -(-slot_bytes // 256) * 256
        memory = torch.empty(self.stride * slots, dtype=torch.uint8, device=device)
        self._tensors = [memory[i * self.stride : i * self.stride + slot_bytes] for i in range(slots)]
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._staging: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def segment(self, slot: int) -> torch.Tensor:
        return self._tensors[slot]

    def readable(self, slot: int) -> memoryview:
        return self._tensors[slot].cpu().numpy().data

    def writable(self, slot: int) -> memoryview:
        staging = torch.empty(self._tensors[slot].numel(), dtype=torch.uint8, pin_memory=True)
        with self._lock:
            self._staging[slot] = staging
        return staging.numpy().data

    def flush(self, slot: int) -> None:
        with self._lock:
            staging = self._staging.pop(slot)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._tensors[slot].copy_(staging, non_blocking=True)
        self._stream.synchronize()

    def close(self) -> None:
        self._tensors.clear()


def open_backing(slot_bytes: int, slots: int, device: torch.device) -> TensorBacking:
    """Memory for `slots` slots on `device`. Errors: `UnsupportedError` for a device that is neither CPU nor CUDA."""
    if device.type == "cpu":
        return HostTensorBacking(slot_bytes, slots)
    if device.type == "cuda":
        return CudaBacking(slot_bytes, slots, device)
    raise UnsupportedError(Reason.MODEL_UNSUPPORTED, f"device {device} is not served", "move the model to CPU or CUDA")


def device_memory(device: torch.device) -> int:
    """Bytes of memory that `device` has in all, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
