"""How each transfer ended, and whether it may have: an outcome must follow from what was done to it, and from nothing
else."""

from __future__ import annotations

from kvstrata.errors import Reason
from kvstrata.lab.soak.reference import Flight, require
from kvstrata.lab.soak.world import World, peek
from kvstrata.store.transfer_records import TransferOutcome

__all__ = ["dropped", "settle"]

_DAMAGE = {
    Reason.CHUNK_TRUNCATED: TransferOutcome.SHORT_COPY,
    Reason.CHUNK_DAMAGED: TransferOutcome.CHECKSUM_MISMATCH,
}


def settle(world: World) -> None:
    """Take note of flights that ended, and let go of what is no longer out. Errors: `BrokenInvariantError`."""
    for flight in world.flights:
        result = flight.waiter.result
        if flight.outcome is None and result is not None:
            flight.outcome = result.outcome
            world.count(f"transfer.{result.outcome}")
            _legal(world, flight)
        require(
            flight.out == flight.waiter.queue.holds(flight.waiter),
            "a flight is held otherwise than it should be:",
            flight.outcome,
            flight.passage.phase,
        )
    ended = [flight for flight in world.flights if not flight.out]
    if ended:
        world.flights = [flight for flight in world.flights if flight.out]
        for flight in ended:
            _arrived(world, flight)
    if world.passages:
        world.passages = [each for each in world.passages if each.phase == "copying" or each.wanted]


def dropped(world: World, flight: Flight) -> bool:
    """Whether a record that the flight fills was dropped, or got its rows otherwise: then it must not be published."""
    return any(
        world.directory.find(item.record.digest) is not item.record
        or item.record.grants[item.layer] not in (None, item.grant)
        for item in flight.items
    )


def _legal(world: World, flight: Flight) -> None:
    outcome, passage, now = flight.outcome, flight.passage, world.clock.now
    landed, fate = passage.phase == "landed", passage.fate
    reasons = {
        TransferOutcome.READY: landed and not fate and not flight.recycled and not _stale(world, flight),
        TransferOutcome.LATE: flight.waiter.deadline <= min(now, passage.landed_at),
        TransferOutcome.CANCELLED: flight.cancelled,
        TransferOutcome.RECYCLED_DESTINATION: flight.recycled,
        TransferOutcome.IDENTITY_MISMATCH: False,
        TransferOutcome.STALE_CACHE_GENERATION: _stale(world, flight),
        TransferOutcome.SHORT_COPY: fate == "short",
        TransferOutcome.CHECKSUM_MISMATCH: fate == "corrupt",
        TransferOutcome.LAYOUT_MISMATCH: fate == "layout",
        TransferOutcome.FAILED: fate == "failed" or passage.interrupted or dropped(world, flight),
    }
    assert outcome is not None
    require(reasons[outcome], "a transfer ended without a cause:", outcome, passage.phase, fate, result_error(flight))


def _stale(world: World, flight: Flight) -> bool:
    return not flight.items and flight.fresh != world.cache_generation


def _arrived(world: World, flight: Flight) -> None:
    """What was published is right; what was not is nobody's any more."""
    arena = world.directory.arena
    if flight.outcome is not TransferOutcome.READY:
        for index, (grant, owner) in enumerate(zip(flight.grants, flight.owners, strict=True)):
            # Of several segments the first may have been published before another was refused.
            kept = bool(flight.items) and flight.items[index].record.grants[flight.items[index].layer] == grant
            require(kept or not arena.belongs(grant, owner), "an ended transfer kept its slot:", flight.outcome, owner)
        return
    for index, (grant, source) in enumerate(zip(flight.grants, flight.passage.unit.segments, strict=True)):
        wanted = world.truths[source.chunk].segments[source.layer]
        if flight.items and flight.items[index].record.grants[source.layer] != grant:
            continue  # evicted or dropped since
        require(peek(arena, grant.slot) == wanted, "a transfer brought other bytes, layer", source.layer)
    if not flight.items:
        world.kept.append((flight.grants, flight.owners))


def fate_of(error_reason: Reason) -> str:
    """What a copier's error makes of its passage."""
    found = _DAMAGE.get(error_reason)
    return {"short_copy": "short", "checksum_mismatch": "corrupt"}.get(found or "", "failed")


def result_error(flight: Flight) -> object:
    """The error that came with the outcome, if any."""
    return None if flight.waiter.result is None else flight.waiter.result.error
