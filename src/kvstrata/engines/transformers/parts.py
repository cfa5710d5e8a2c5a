"""What a memory is built from where a caller brings parts of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvstrata.cost.credits import Credits
from kvstrata.ports import Clock, StepLoop
from kvstrata.store.transfer_records import Acknowledgement, CopyEvent
from kvstrata.tiers.device import TensorBacking, open_backing
from kvstrata.tiers.memory import Backing, HostBacking

__all__ = ["MemoryParts"]


@dataclass(frozen=True)
class MemoryParts:
    """Parts that `attach` would choose itself: for memory of another kind, and for injecting faults and clocks.

    device_backing(slot_bytes, slots, device), host_backing(slot_bytes, slots): make the memory of the two arenas.
    credits: what may be on its way to the device at once, publish_credits: what may be on its way to the store; `None`
    for as much as the device holds. A chunk that gets none stays in memory until it does. deliver: how a reader's
    acknowledgement reaches its queue, as in `TransferQueue`. clock: for receipts and deadlines. loop: asked when a
    gate postpones a step; `None` for a plain wait.
    """

    device_backing: Callable[[int, int, torch.device], TensorBacking] = open_backing
    host_backing: Callable[[int, int], Backing] = HostBacking
    credits: Credits | None = None
    publish_credits: Credits | None = None
    deliver: Callable[[Callable[[CopyEvent], Acknowledgement], CopyEvent], object] | None = None
    clock: Clock = time.perf_counter
    loop: StepLoop | None = None
