"""Copying chosen rows out of the tiers into one slot, and proving that what arrived is what was read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import Reason, RetrievalError
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.retrieval.row_tiers import RowTier, row_views

__all__ = ["RowPlan", "copy_rows"]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row to copy: its position, its chunk, and the tier that it comes from."""

    position: int
    record: ChunkRecord
    tier: str


@dataclass(slots=True)
class _Progress:
    keys: list[memoryview] = field(default_factory=list)
    values: list[memoryview] = field(default_factory=list)


def copy_rows(
    plan: Sequence[RowPlan],
    tiers: Mapping[str, RowTier],
    layout: SegmentLayout,
    layer: int,
    kv_head: int,
    target: memoryview,
    may_go_on: Callable[[int], bool],
) -> str | None:
    """Fill `target` with K of all rows, then V of all rows, each `head_dim` elements in the plan's order.

    A segment that several rows come from is read once. may_go_on: asked after each row with the rows copied so far;
    False ends the copy with `None`. Otherwise returns the hexadecimal digest of the rows as they lie in `target`.
    Blocks on reads. Errors: those of the tiers; `RetrievalError` with ROW_DIGEST_MISMATCH when other bytes arrived.
    """
    size = layout.head_dim * layout.itemsize
    rows = _Progress()
    with contextlib.ExitStack() as segments:
        opened: dict[tuple[bytes, str], memoryview] = {}
        for index, row in enumerate(plan):
            source = (row.record.digest, row.tier)
            if source not in opened:
                opened[source] = segments.enter_context(tiers[row.tier].segment(row.record, layer))
            key, value = row_views(opened[source], layout, kv_head, row.position - row.record.identity.start)
            target[index * size : (index + 1) * size] = key
            start = (len(plan) + index) * size
            target[start : start + size] = value
            rows.keys.append(key)
            rows.values.append(value)
            if not may_go_on(index + 1):
                return None
        sent = blake3()
        for view in (*rows.keys, *rows.values):
            sent.update(view)
        arrived = blake3(target[: 2 * len(plan) * size]).hexdigest()
        if sent.hexdigest() != arrived:
            raise RetrievalError(
                Reason.ROW_DIGEST_MISMATCH,
                "the gathered rows differ from those that were read",
                "gather again; check the memory if this happens twice",
                field="gather.rows",
            )
    return arrived
