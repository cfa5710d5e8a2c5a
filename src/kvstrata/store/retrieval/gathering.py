"""Copying chosen rows out of the tiers into one slot, and proving that what arrived is what was read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import Reason, RetrievalError
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.retrieval.destination import GatherDestination
from kvstrata.store.retrieval.row_tiers import RowTier, row_views
from kvstrata.tiers.memory import Grant

__all__ = ["CopiedRows", "RowPlan", "copy_rows", "gather_rows"]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row to copy: its position, its chunk, and the tier that it comes from."""

    position: int
    record: ChunkRecord
    tier: str


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows that are visible in a slot. event: what made them so. digest: of the bytes, K before V. size: of both."""

    grant: Grant
    event: int
    digest: str
    size: int


def gather_rows(
    plan: Sequence[RowPlan],
    tiers: Mapping[str, RowTier],
    layout: SegmentLayout,
    layer: int,
    kv_head: int,
    destination: GatherDestination,
    owner: str,
    in_time: Callable[[], bool],
) -> CopiedRows | int:
    """Reserve a slot, fill it as `copy_rows` does, and publish it; or the number of rows that came before time was up.

    Whatever ends it early, the slot is free again. Blocks on reads. Errors: as `copy_rows`, and `BudgetError`.
    """
    size = 2 * len(plan) * layout.head_dim * layout.itemsize
    grant = destination.reserve(owner, size)
    arrived = 0

    def may_go_on(done: int) -> bool:
        nonlocal arrived
        arrived = done
        return in_time()

    published = False
    try:
        target = destination.arena.backing.writable(grant.slot)
        digest = copy_rows(plan, tiers, layout, layer, kv_head, target, may_go_on)
        if digest is None:
            return arrived
        event = destination.publish(grant, owner)
        published = True
    finally:
        if not published:
            destination.arena.release(grant)
    return CopiedRows(grant, event, digest, size)


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
    keys: list[memoryview] = []
    values: list[memoryview] = []
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
            keys.append(key)
            values.append(value)
            if not may_go_on(index + 1):
                return None
        sent = blake3()
        for view in (*keys, *values):
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
