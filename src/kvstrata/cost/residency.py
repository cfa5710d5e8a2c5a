"""How many chunks stay in fast memory, and how far ahead the others come back: pure arithmetic over slots.

Decoding walks the layers in the same order for every token, so a recency rule would always evict what is needed next.
The best static split keeps R whole chunks resident in all layers and gives the rest to `depth` layers in flight:

    slots needed = tail + R * layers + depth * (chunks - R)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ResidencyPlan", "plan_residency", "required_slots"]


@dataclass(frozen=True)
class ResidencyPlan:
    """resident_chunks: chunks kept in every layer. depth: layers whose cold segments may be in memory at once."""

    resident_chunks: int
    depth: int


def required_slots(layers: int, chunks: int, tail_chunks: int) -> int:
    """Fewest slots that let every layer run: the open tail, and one layer's sealed segments."""
    return tail_chunks * layers + chunks


def plan_residency(slots: int, layers: int, chunks: int, tail_chunks: int, depth: int = 2) -> ResidencyPlan | None:
    """Split `slots` between resident chunks and layers in flight; `None` when even one layer does not fit.

    slots: slots for this request, tail included. chunks: sealed chunks. tail_chunks: open chunks, resident in all
    layers.
    depth: layers in flight that are wanted; fewer are planned when the memory is too small for it.
    """
    room = slots - tail_chunks * layers
    if chunks * layers <= room:
        return ResidencyPlan(chunks, 0)
    for ahead in range(min(depth, layers), 0, -1):
        spare = room - ahead * chunks
        if spare >= 0:
            resident = spare // (layers - ahead) if layers > ahead else chunks
            return ResidencyPlan(min(chunks, resident), ahead)
    return None
