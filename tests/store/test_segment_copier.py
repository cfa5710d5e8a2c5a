"""Real chunks through a real queue: the bytes that arrive are those of the segment asked for, or it is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from chunks_and_faults import LAYERS, LAYOUT, flip, make_chunk

from kvstrata.cost.credits import Credits
from kvstrata.errors import Reason
from kvstrata.store.buffers import used_pages
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.destinations import SlotDestination
from kvstrata.store.segment_copier import OpenedEachTime, SegmentCopier
from kvstrata.store.transfer_records import SegmentSource, TransferOutcome, UnitKey
from kvstrata.store.transfer_state import Waiter
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.files import FileTier, payload_bytes
from kvstrata.tiers.memory import HostBacking, MemoryArena

CHUNK = make_chunk(3, tokens=100)
NBYTES = LAYERS * payload_bytes(LAYOUT, 100)


@pytest.fixture
def arena() -> MemoryArena:
    return MemoryArena(LAYOUT.segment_bytes, HostBacking(LAYOUT.segment_bytes, 2 * LAYERS))


@pytest.fixture
def tier(tmp_path: Path) -> FileTier:
    tier = FileTier(tmp_path)
    tier.write(*CHUNK.arguments)
    return tier


def ask(queue: TransferQueue, arena: MemoryArena, **changes: object) -> Waiter:
    segments = tuple(SegmentSource(CHUNK.digest, layer) for layer in range(LAYERS))
    context = CHUNK.identity.context
    unit = UnitKey(context.namespace, context.digest, segments, LAYOUT, "files")
    grants = [arena.reserve(layer) for layer in range(LAYERS)]
    answer = queue.submit(
        dataclasses.replace(unit, **changes),  # type: ignore[arg-type]
        NBYTES,
        SlotDestination(arena, grants, range(LAYERS)),  # type: ignore[arg-type]
    )
    assert isinstance(answer, Waiter)
    return answer


def make_queue(tier: FileTier) -> TransferQueue:
    pool = CreditPool(Credits(1 << 30, 1 << 30, 1 << 30, 4))
    return TransferQueue("files -> host", pool, SegmentCopier(OpenedEachTime(tier)))


def test_two_requests_get_the_rows_of_every_layer(tier: FileTier, arena: MemoryArena) -> None:
    queue = make_queue(tier)
    waiters = [ask(queue, arena), ask(queue, arena)]
    assert [waiter.finish().ready for waiter in waiters] == [True, True]
    assert (queue.totals.moved_bytes, queue.totals.coalesced_bytes) == (NBYTES, NBYTES)
    for waiter in waiters:
        for layer, grant in enumerate(waiter.destination.grants):  # type: ignore[attr-defined]
            parts = used_pages(arena.backing.readable(grant.slot), LAYOUT, 100)
            assert b"".join(map(bytes, parts)) == CHUNK.payload(layer)


def test_damage_and_absence(tier: FileTier, arena: MemoryArena) -> None:
    queue, path = make_queue(tier), tier.path(CHUNK.digest)
    size = path.stat().st_size
    flip(path, size - 10)
    result = ask(queue, arena).finish()
    assert result.outcome is TransferOutcome.CHECKSUM_MISMATCH
    path.unlink()
    result = ask(queue, arena).finish()
    assert (result.outcome, result.error and result.error.reason) == (TransferOutcome.FAILED, Reason.CHUNK_MISSING)
    assert arena.free_slots == 2 * LAYERS


@pytest.mark.parametrize("changes", [{"layout": dataclasses.replace(LAYOUT, page_tokens=128)}, {"context": b"other"}])
def test_another_layout_or_context_is_not_read(tier: FileTier, arena: MemoryArena, changes: dict[str, object]) -> None:
    result = ask(make_queue(tier), arena, **changes).finish()
    assert (result.outcome, result.error and result.error.reason) == (TransferOutcome.FAILED, Reason.CHUNK_FOREIGN)
    assert arena.free_slots == 2 * LAYERS
