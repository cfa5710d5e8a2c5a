"""How many chunks stay in fast memory, and how far ahead the others come back: pure arithmetic over slots.

Decoding walks the layers in the same order for every token, so a recency rule would always evict what is needed next.
The best static split keeps some chunks resident in every layer that reads them, and gives the rest of the memory to
`depth` layers in flight:

    slots needed = tail + sum of the kept chunks' costs + depth * (chunks that are not kept)

A chunk costs one slot for every layer that reads it: all of them, or fewer once it lies behind the window of some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["ResidencyPlan", "plan_residency", "required_slots"]


@dataclass(frozen=True)
class ResidencyPlan:
    """resident_chunks: chunks kept in every layer that reads them. depth: layers whose cold segments may be in memory
    at once.
    """

    resident_chunks: int
    depth: int


def required_slots(layers: int, chunks: int, tail_chunks: int) -> int:
    """Fewest slots that let every layer run: the open tail, and one layer's sealed segments."""
    return tail_chunks * layers + chunks


def plan_residency(slots: int, costs: Sequence[int], tail_slots: int, depth: int = 2) -> ResidencyPlan | None:
    """Split `slots` between resident chunks and layers in flight; `None` when even one layer does not fit.

    costs: slots that each sealed chunk takes when it is kept, at least one, in the order in which chunks are preferred.
    tail_slots: slots of the open tail. depth: layers in flight that are wanted; fewer are planned when the memory is
    too small for it.
    """
    room, chunks = slots - tail_slots, len(costs)
    totals = [0, *accumulate(costs)]
    if totals[-1] <= room:
        return ResidencyPlan(chunks, 0)
    for ahead in range(min(depth, max(costs, default=0)), 0, -1):
        for resident in range(chunks - 1, -1, -1):
            if totals[resident] + ahead * (chunks - resident) <= room:
                return ResidencyPlan(resident, ahead)
    return None
