"""Ends: of everything in order, of a process that is killed, and of what an interruption left half done."""

from __future__ import annotations

from kvstrata.contract.states import FileReplicaState
from kvstrata.errors import Reason, StoreError
from kvstrata.lab.soak.histories import give_up
from kvstrata.lab.soak.invariants import quiet
from kvstrata.lab.soak.readers import leave_one
from kvstrata.lab.soak.reference import Flight, require
from kvstrata.lab.soak.replicas import write_next
from kvstrata.lab.soak.rows import LAYERS
from kvstrata.lab.soak.settlement import settle
from kvstrata.lab.soak.transfers import deliver
from kvstrata.lab.soak.world import World
from kvstrata.store.destinations import SlotDestination
from kvstrata.store.transfer_records import CopyEvent

__all__ = ["ACTIONS", "close", "quiesce", "reboot", "reclaim"]


def reclaim(world: World) -> str:
    """After an interruption: whatever nobody waits for is taken back, as an engine does it."""
    kept = [flight for flight in world.flights if world.rng.random() < 0.5]
    return take_back(world, kept)


def take_back(world: World, kept: list[Flight]) -> str:
    """Reclaim everything but what `kept` waits for."""
    for flight in world.flights:
        flight.cancelled |= flight not in kept
    known = world.promoter.reclaim([flight.batch for flight in kept if flight.batch is not None])
    for place in world.bare.reclaim([flight.waiter for flight in kept if flight.batch is None]):
        assert isinstance(place, SlotDestination)
        known.update(place.grants)
    for line in world.lines:
        known.update(line.history.grants)
    for grants, _ in world.kept:
        known.update(grants)
    world.reserved.clear()
    world.directory.reclaim(known)
    world.cache.reclaim()
    settle(world)
    world.awaited = [flight for flight in world.awaited if not flight.cancelled]
    return "done"


def kill(world: World) -> str:
    """The process ends without a word."""
    world.dead = True
    return "killed"


def reboot(world: World) -> None:
    """A new process finds the tier: what was published durably is there and right, unless it was damaged."""
    world.count("rebooted")
    for record in world.directory:
        if record.file is FileReplicaState.PUBLISHED:
            for layer in range(LAYERS):
                found = world.tier.content(record.digest, layer) == world.truths[record.digest].segments[layer]
                require(found or (record.digest, layer) in world.harmed, "a durable chunk was lost with the process")
    world.dead = False
    world.injector.revive()
    world.boot()


def quiesce(world: World) -> None:
    """Give everything up that can be, and let everything arrive that is under way."""
    world.injector.enabled = False
    world.meanwhile = lambda: None
    for flight in world.flights:
        flight.cancelled = True
        flight.waiter.cancel()
    for passage in world.passages:
        if passage.phase == "copying" and passage.event is None:
            error = StoreError(Reason.STORE_IO, "the copier gave up")
            passage.event = CopyEvent(passage.generation, 0, passage.unit.layout, error=error)
            passage.fate = "failed"
            world.due.append((world.clock.now, passage, passage.event))
    settle(world)
    while world.due:
        deliver(world, 0)
    for promotions in world.reserved:
        for item in promotions:
            world.directory.abandon(item.record, item.layer, item.grant)
    world.reserved.clear()
    while world.writing:
        write_next(world)


def close(world: World) -> None:
    """End what is left. Errors: `BrokenInvariantError` when anything is still out afterwards."""
    for each in list(world.held):
        while each.readers:
            leave_one(world, each)
        world.leases.release(each.lease)
    world.held.clear()
    for grants, _ in world.kept:
        for grant in grants:
            world.directory.arena.release(grant)
    world.kept.clear()
    for line in list(world.lines):
        give_up(world, line)
    while world.pins:
        world.directory.drop(world.pins.pop())
    quiet(world)
    world.promoter.close()


ACTIONS = {"reclaim": (reclaim, 0.3), "kill": (kill, 0.06)}
