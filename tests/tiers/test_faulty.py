"""Faults of whole operations have the outcome that the table says, and everything else passes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chunks_and_faults import make_chunk

from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan, Injection
from kvstrata.tiers.faulty import FaultyBacking, FaultyDelivery, FaultyTier
from kvstrata.tiers.files import FileTier, WriteOutcome
from kvstrata.tiers.memory import HostBacking, MemoryArena

CHUNK = make_chunk(1)


def injector(operation: str, *faults: Fault) -> FaultInjector:
    return FaultInjector(FaultPlan(explicit=tuple(Injection(operation, i, fault) for i, fault in enumerate(faults))))


def read(tier: FaultyTier) -> bytes:
    with tier.open(CHUNK.digest) as reader:
        target = bytearray(reader.segment_bytes)
        assert reader.read_into(0, [memoryview(target)]) == reader.segment_bytes
        return bytes(target)


def test_without_a_plan_everything_passes_through(tmp_path: Path) -> None:
    below = FileTier(tmp_path)
    tier = FaultyTier(below, FaultInjector(FaultPlan()))
    assert tier.write(*CHUNK.arguments).outcome is WriteOutcome.WRITTEN
    assert (tier.has(CHUNK.digest), list(tier.list())) == (True, [CHUNK.digest])
    assert (tier.capability, tier.durable, tier.read_only) == (below.capability, False, False)
    assert read(tier) == CHUNK.payload(0)
    with tier.open(CHUNK.digest) as reader:
        assert reader.verify_payload().bytes == reader.nbytes
        assert (reader.identity, reader.layout, reader.layers, reader.tokens) == (CHUNK.identity, CHUNK.layout, 3, 128)
    assert tier.revoke(CHUNK.digest) is True
    assert below.has(CHUNK.digest) is False


@pytest.mark.parametrize(
    ("operation", "fault", "reason"),
    [
        ("open_chunk", Fault.LOSE, Reason.CHUNK_MISSING),
        ("read", Fault.LOSE, Reason.STORE_IO),
        ("read", Fault.SHORTEN, Reason.CHUNK_TRUNCATED),
        ("read", Fault.CORRUPT, Reason.CHUNK_DAMAGED),
    ],
)
def test_reads(tmp_path: Path, operation: str, fault: Fault, reason: Reason) -> None:
    """A hit is not an arrival."""
    FileTier(tmp_path).write(*CHUNK.arguments)
    tier = FaultyTier(FileTier(tmp_path), injector(operation, fault))
    assert tier.has(CHUNK.digest)
    with pytest.raises(StoreError) as refusal:
        read(tier)
    assert refusal.value.reason is reason
    assert read(tier) == CHUNK.payload(0)


def test_writes(tmp_path: Path) -> None:
    tier = FaultyTier(FileTier(tmp_path), injector("write", Fault.FILL_UP, Fault.LOSE, Fault.DUPLICATE))
    with pytest.raises(StoreError) as refusal:
        tier.write(*CHUNK.arguments)
    assert refusal.value.reason is Reason.STORE_FULL
    assert tier.write(*CHUNK.arguments).outcome is WriteOutcome.WRITTEN
    assert not tier.has(CHUNK.digest)
    assert tier.write(*CHUNK.arguments).outcome is WriteOutcome.WRITTEN
    assert read(tier) == CHUNK.payload(0)


def test_a_chunk_that_is_not_found(tmp_path: Path) -> None:
    FileTier(tmp_path).write(*CHUNK.arguments)
    tier = FaultyTier(FileTier(tmp_path), injector("has", Fault.LOSE))
    assert [tier.has(CHUNK.digest), tier.has(CHUNK.digest)] == [False, True]


def test_memory_that_fails() -> None:
    backing = FaultyBacking(HostBacking(64, 3), injector("flush", Fault.CORRUPT, Fault.LOSE))
    arena = MemoryArena(64, backing)
    for slot in range(3):
        backing.writable(slot)[:] = b"\x05" * 64
        backing.flush(slot)
    assert arena.slots == 3
    assert [bytes(backing.readable(slot)) for slot in range(3)] == [
        b"\x05" * 32 + b"\x04" + b"\x05" * 31,
        bytes(64),
        b"\x05" * 64,
    ]
    assert backing.stride == 4096
    backing.close()


@pytest.mark.parametrize(
    ("faults", "at_once", "flushed"),
    [
        ((), [1, 2, 3], 0),
        ((Fault.DUPLICATE,), [1, 1, 2, 3], 0),
        ((Fault.REORDER,), [2, 1, 3], 0),
        ((Fault.REORDER, Fault.REORDER), [3, 1, 2], 0),
        ((Fault.LOSE,), [2, 3], 1),
    ],
)
def test_acknowledgements(faults: tuple[Fault, ...], at_once: list[int], flushed: int) -> None:
    delivery, taken = FaultyDelivery(injector("acknowledge", *faults)), []
    take: Callable[[int], object] = taken.append
    for number in (1, 2, 3):
        delivery(take, number)
    assert taken == at_once
    assert delivery.flush() == flushed
    assert sorted(set(taken)) == [1, 2, 3]
