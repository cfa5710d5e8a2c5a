"""The block table of one layer: which slot holds which segment of its history."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["BlockTable", "require_kernel_geometry"]

_HEAD_DIM_STEP, _HEAD_DIM_MAX = 8, 256


def require_kernel_geometry(layout: SegmentLayout) -> None:
    """Errors: `ConfigurationError` for a head that the kernels' vectors do not fit; the store keeps rows of any."""
    if layout.head_dim % _HEAD_DIM_STEP or layout.head_dim > _HEAD_DIM_MAX:
        raise _invalid(
            f"head_dim must be a multiple of {_HEAD_DIM_STEP} from {_HEAD_DIM_STEP} to {_HEAD_DIM_MAX} for attention "
            f"kernels, got {layout.head_dim}"
        )


class BlockTable:
    """Segments of one layer in order; segment i holds tokens [i * chunk_tokens, (i + 1) * chunk_tokens).

    Holds the slot views, so that their memory outlives the table, and their addresses for the native kernels.
    Errors: as `require_kernel_geometry`.

    Attributes:
        layout: geometry of every segment.
        segments: slot views in order, one-dimensional ``torch.uint8``; read only.
        pointer: address of the array of segment addresses; changes when the table grows.
        native: whether all segments lie in host memory, where native code can read them.
    """

    __slots__ = ("_addresses", "layout", "native", "pointer", "segments")

    def __init__(self, layout: SegmentLayout) -> None:
        require_kernel_geometry(layout)
        self.layout = layout
        self.segments: list[Tensor] = []
        self.native = True
        self._addresses = array("Q")
        self.pointer = 0

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def capacity(self) -> int:
        """Tokens that the segments hold."""
        return len(self.segments) * self.layout.chunk_tokens

    def set(self, index: int, segment: Tensor) -> None:
        """Puts `segment` at `index`, or behind the last one when `index` is the length.

        `segment` is a contiguous ``torch.uint8`` view of at least `layout.segment_bytes` bytes.
        """
        if not 0 <= index <= len(self.segments):
            raise _invalid(f"index must be from 0 to {len(self.segments)}, got {index}")
        if segment.dtype != torch.uint8 or segment.dim() != 1 or not segment.is_contiguous():
            raise _invalid(
                "segment must be a contiguous one-dimensional uint8 tensor, "
                f"got {segment.dtype} of shape {tuple(segment.shape)} and stride {segment.stride()}"
            )
        if segment.numel() < self.layout.segment_bytes:
            raise _invalid(f"segment must hold {self.layout.segment_bytes} bytes, got {segment.numel()}")
        if segment.storage_offset() % self.layout.itemsize:
            raise _invalid(f"segment must start at a multiple of {self.layout.itemsize} bytes in its storage")
        address = segment.data_ptr()
        if index == len(self.segments):
            self.segments.append(segment)
            self._addresses.append(address)
            self.pointer = self._addresses.buffer_info()[0]
        else:
            self.segments[index] = segment
            self._addresses[index] = address
        self.native = self.native and segment.device.type == "cpu"

    def replace(self, index: int, segment: Tensor, address: int) -> None:
        """Puts a segment that `set` has accepted before, and its address, at an `index` below the length; unchecked."""
        self.segments[index] = segment
        self._addresses[index] = address

    def address(self, index: int) -> int:
        """Address of the segment at `index`."""
        return self._addresses[index]

    def append(self, segment: Tensor) -> None:
        """Puts `segment` behind the last one; see `set`."""
        self.set(len(self.segments), segment)

    def truncate(self, length: int) -> None:
        """Drops the segments from `length` on."""
        if not 0 <= length <= len(self.segments):
            raise _invalid(f"length must be from 0 to {len(self.segments)}, got {length}")
        del self.segments[length:]
        del self._addresses[length:]
        self.pointer = self._addresses.buffer_info()[0]


def _invalid(cause: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, cause)
