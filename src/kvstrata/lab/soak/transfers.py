"""Actions on transfers: step by step, with completions that come late, twice, in another order, short or wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.states import ResidencyState
from kvstrata.cost.credits import Credits, shortage
from kvstrata.errors import DamagedError, Reason, StateError, StoreError
from kvstrata.lab.soak.reference import Flight, Passage, require
from kvstrata.lab.soak.rows import LAYERS, LAYOUT
from kvstrata.lab.soak.settlement import dropped, fate_of, settle
from kvstrata.lab.soak.world import SEGMENT, World
from kvstrata.store.destinations import SlotDestination
from kvstrata.store.promotion import Promotion
from kvstrata.store.transfer_records import Acknowledgement, CopyEvent, Refusal, SegmentSource, UnitKey
from kvstrata.store.transfer_state import Waiter
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.memory import Grant

__all__ = ["ACTIONS", "begin", "complete", "deliver"]

_OTHER = SegmentLayout(1, 1, 8, "float16", 4, 4)
_FATES = ("", "short", "corrupt", "layout", "failed", "lost", "twice")
_WEIGHTS = (70, 4, 4, 3, 4, 6, 9)


def promote(world: World) -> str:
    """Reserve slots for segments that are not on the device, and begin to read them, at once or later."""
    away = [
        (record, layer)
        for record in world.directory
        for layer in range(LAYERS)
        if record.residency[layer] is ResidencyState.DEVICE_RELEASED
    ]
    if not away:
        return "idle"
    wanted = world.rng.sample(away, min(len(away), world.rng.randint(1, 4)))
    free = world.directory.arena.free_slots
    promotions = world.promoter.reserve(wanted)
    require((promotions is None) == (free < len(wanted)), "slots were refused or found:", free, len(wanted))
    if promotions is None:
        return "full"
    if world.rng.random() < 0.15:
        world.reserved.append(promotions)
        return "reserved"
    return begin(world, promotions)


def begin(world: World, promotions: Sequence[Promotion]) -> str:
    """Start reading into reserved slots."""
    size = len(promotions) * SEGMENT
    try:
        batch = world.promoter.start(promotions)
    except StoreError as error:
        settle(world)
        needed = Credits(size, size, size, 1)
        require(shortage(world.promoter.pool.free, needed) is not None, "credits were refused that are there")
        return str(error.reason)
    for waiter in batch.waiters:
        flight = _launched(world, world.promoter.queue, waiter, tuple(promotions))
        flight.batch = batch
        world.awaited.append(flight)
    return "started"


def begin_reserved(world: World) -> str:
    """Start, or give up, a promotion that was reserved earlier."""
    if not world.reserved:
        return "idle"
    promotions = world.reserved.pop(world.rng.randrange(len(world.reserved)))
    overtaken = any(each.record.residency[each.layer] is not ResidencyState.PROMOTE_RESERVED for each in promotions)
    if overtaken or world.rng.random() < 0.3:
        for item in promotions:
            world.directory.abandon(item.record, item.layer, item.grant)
        return "given_up"
    return begin(world, promotions)


def read(world: World) -> str:
    """Another reader of durable chunks, with slots of its own; it may join a read that is under way."""
    names = list(world.tier.list())
    joined = [passage for passage in world.passages if passage.queue is world.bare and passage.phase != "landed"]
    if joined and world.rng.random() < 0.6:
        unit = world.rng.choice(joined).unit
    elif names:
        truth = world.truths[world.rng.choice(names)]
        layers = sorted(world.rng.sample(range(LAYERS), world.rng.randint(1, LAYERS)))
        segments = tuple(SegmentSource(truth.identity.digest, layer) for layer in layers)
        context = truth.identity.context
        unit = UnitKey(context.namespace, context.digest, segments, LAYOUT, "files")
    else:
        return "idle"
    arena, owners, grants = world.directory.arena, [], list[Grant]()
    world.number += 1
    for source in unit.segments:
        owners.append(("bare", world.number, source.layer))
        grant = arena.reserve(owners[-1])
        if grant is None:
            for each in grants:
                arena.release(each)
            return "full"
        grants.append(grant)
    fresh = world.cache_generation
    place = SlotDestination(arena, grants, owners, fresh=lambda: world.cache_generation == fresh)
    deadline = world.clock.now + world.rng.uniform(0.005, 5.0)
    before, queue = world.promoter.pool.free, world.bare
    answer = queue.submit(unit, place.nbytes, place, deadline=deadline)
    if isinstance(answer, Refusal):
        settle(world)
        if answer.reason in (Reason.CREDIT_PRESSURE, Reason.QUEUE_FULL):
            needed = Credits(place.nbytes, place.nbytes, place.nbytes, 1)
            require(shortage(before, needed) is not None, "credits were refused that are there")
        place.release()
        return str(answer.reason)
    flight = _launched(world, queue, answer)
    return "joined" if len(flight.passage.flights) > 1 else "started"


def _launched(world: World, queue: TransferQueue, waiter: Waiter, items: tuple[Promotion, ...] = ()) -> Flight:
    transfer, place = waiter.transfer, waiter.destination
    assert transfer is not None
    assert isinstance(place, SlotDestination)
    found = [each for each in world.passages if each.queue is queue and each.generation == transfer.generation]
    passage = found[0] if found else Passage(queue, transfer.unit, transfer.generation, transfer.nbytes)
    if not found:
        world.passages.append(passage)
    flight = Flight(waiter, passage, place.grants, place.owners, place.nbytes, world.cache_generation, items)
    passage.flights.append(flight)
    world.flights.append(flight)
    return flight


def start(world: World) -> str:
    """A copier takes the next read."""
    queue = world.rng.choice((world.promoter.queue, world.bare))
    order = queue.start()
    settle(world)
    if order is None:
        waiting = [each for each in world.passages if each.queue is queue and each.phase == "queued" and each.wanted]
        require(not waiting, "a read is queued and was not found")
        return "idle"
    passage = next(
        (each for each in world.passages if each.generation == order.generation and each.queue is queue), None
    )
    if passage is None or passage.phase != "queued":
        require(False, "a read was started that nobody waits for, or twice:", order.generation)
        return "never"
    passage.phase, passage.order = "copying", order
    return "started"


def copy(world: World) -> str:
    """The copier moves the bytes, and says so, or something else."""
    passages = [each for each in world.passages if each.phase == "copying" and each.event is None]
    if not passages:
        return "idle"
    passage = world.rng.choice(passages)
    order, place = passage.order, passage.order.into if passage.order else None
    assert order is not None
    assert isinstance(place, SlotDestination)
    arena = world.directory.arena
    for grant, owner in zip(place.grants, place.owners, strict=True):
        require(arena.belongs(grant, owner), "a slot was given away under its copier:", owner)
    fate = world.rng.choices(_FATES, _WEIGHTS)[0]
    try:
        if fate == "failed":
            raise StoreError(Reason.STORE_IO, "injected: the medium does not answer", "try again")
        event = passage.queue.copier.read(order)
    except StoreError as error:
        event = CopyEvent(order.generation, 0, order.unit.layout, order.unit.codec, error=error)
        passage.fate = fate_of(error.reason)
    except StateError as error:
        # Its record was dropped while a copy of it was to be kept in the host tier.
        broken = StoreError(error.reason, error.cause)
        event = CopyEvent(order.generation, 0, order.unit.layout, order.unit.codec, error=broken)
        passage.fate = "failed"
    else:
        passage.fate = fate if fate in ("short", "corrupt", "layout") else ""
        if passage.fate:
            event = _spoil(world, passage, place, event)
    passage.event = event
    when = world.clock.now + (world.rng.uniform(2.0, 12.0) if fate == "lost" else 0.0)
    world.due.append((when, passage, event))
    if fate == "twice":
        world.due.append((world.clock.now + world.rng.uniform(0.0, 1.0), passage, event))
    return fate or "whole"


def _spoil(world: World, passage: Passage, place: SlotDestination, event: CopyEvent) -> CopyEvent:
    """What is wrong about a completion is wrong about the bytes as well."""
    slot = place.arena.backing.writable(world.rng.choice(place.grants).slot)
    if passage.fate == "layout":
        slot[:] = bytes(reversed(bytes(slot)))
        return dataclasses.replace(event, layout=_OTHER)
    if passage.fate == "corrupt":
        slot[world.rng.randrange(slot.nbytes)] ^= 1 << world.rng.randrange(8)
        return dataclasses.replace(event, checksum_ok=False)
    lack = world.rng.randint(1, slot.nbytes)
    slot[slot.nbytes - lack :] = bytes(byte ^ 0xFF for byte in slot[slot.nbytes - lack :])
    return dataclasses.replace(event, bytes_completed=event.bytes_completed - lack)


def complete(world: World) -> str:
    """One of the completions that are under way arrives; not the oldest, as a rule."""
    ripe = [index for index, (when, _, _) in enumerate(world.due) if when <= world.clock.now]
    if not ripe:
        return "idle"
    return deliver(world, world.rng.choice(ripe))


def deliver(world: World, index: int) -> str:
    """Hand a completion over and compare what is made of it."""
    _, passage, event = world.due.pop(index)
    first = passage.phase == "copying"
    answer = passage.queue.complete(event)
    now = world.clock.now
    alive = any(each.outcome is None and (each.waiter.deadline > now) for each in passage.flights)
    if not first:
        wanted = Acknowledgement.DUPLICATE
    else:
        wanted = Acknowledgement.ACCEPTED if alive else Acknowledgement.STALE
        passage.phase, passage.landed_at = "landed", now
    require(answer is wanted, "a completion was taken as", answer, "not", wanted)
    settle(world)
    return str(answer)


def foreign(world: World) -> str:
    """A completion of a transfer that does not exist, or whose copy has not begun."""
    queue = world.rng.choice((world.promoter.queue, world.bare))
    queued = [each for each in world.passages if each.queue is queue and each.phase == "queued"]
    generation = world.rng.choice(queued).generation if queued and world.rng.random() < 0.5 else 10**9
    answer = queue.complete(CopyEvent(generation, SEGMENT, LAYOUT))
    require(answer is Acknowledgement.UNKNOWN, "a foreign completion was taken as", answer)
    return "queued" if generation < 10**9 else "unknown"


def poll(world: World) -> str:
    """A request looks whether its bytes have come; those that have must be there at once."""
    if not world.flights:
        return "idle"
    flight = world.rng.choice(world.flights)
    passage, waiting = flight.passage, flight.outcome is None
    result = flight.waiter.poll()
    ready = waiting and passage.phase == "landed" and not passage.fate
    settle(world)
    if ready:
        require(result is not None, "bytes have landed, and their request is told to wait on")
        spoiled = (
            flight.recycled or dropped(world, flight) or (not flight.items and flight.fresh != world.cache_generation)
        )
        require(result is None or result.ready != spoiled, "bytes have landed, and ended as", flight.outcome)
    return str(flight.outcome or "waiting")


def finish(world: World) -> str:
    """A step waits for its promotions, which have ended one way or the other."""
    ended = [each for each in world.awaited if each.passage.phase == "landed" or each.outcome is not None]
    if not ended:
        return "idle"
    flight = world.rng.choice(ended)
    world.awaited.remove(flight)
    assert flight.batch is not None
    try:
        arrival = flight.batch.finish()
    except DamagedError as error:
        settle(world)
        world.revoke(bytes.fromhex(error.chunk))
        return "damaged"
    except (StoreError, StateError):
        settle(world)
        return "refused"
    settle(world)
    require(arrival.nbytes == flight.passage.nbytes, "a batch brought", arrival.nbytes, "of", flight.passage.nbytes)
    return "arrived"


def cancel(world: World) -> str:
    """A request gives up, wherever its transfer is."""
    if not world.flights:
        return "idle"
    flight = world.rng.choice(world.flights)
    flight.cancelled = True
    phase = flight.passage.phase
    if flight.batch is not None and phase != "copying":
        flight.batch.abandon()
    else:
        flight.waiter.cancel()
    settle(world)
    return phase


def reset(world: World) -> str:
    """Everything is cancelled, and the cache is in another generation."""
    queue = world.rng.choice((world.promoter.queue, world.bare))
    for flight in world.flights:
        flight.cancelled |= flight.waiter.queue is queue
    queue.reset()
    world.cache_generation += 1
    return "done"


def move_on(world: World) -> str:
    """The cache is in another generation, and nobody was told."""
    world.cache_generation += 1
    return "done"


def recycle(world: World) -> str:
    """Slots are taken away from a transfer that nobody copies for, as a reset of their arena would."""
    open_ = [each for each in world.flights if each.passage.phase != "copying" and not each.recycled]
    if not open_:
        return "idle"
    flight = world.rng.choice(open_)
    flight.recycled = True
    if flight.items:
        for item in flight.items:
            world.directory.abandon(item.record, item.layer, item.grant)
    else:
        for grant in flight.grants:
            world.directory.arena.release(grant)
    return flight.passage.phase


def free(world: World) -> str:
    """A reader is done with the slots that it was brought."""
    if not world.kept:
        return "idle"
    grants, _ = world.kept.pop(world.rng.randrange(len(world.kept)))
    for grant in grants:
        world.directory.arena.release(grant)
    return "done"


def expire(world: World) -> str:
    """Time passes; deadlines that are over end the waiting."""
    world.clock.advance(world.rng.choice((0.01, 0.1, 0.5, 2.0)))
    late = world.promoter.queue.expire() + world.bare.expire()
    settle(world)
    return "late" if late else "none"


ACTIONS = {
    "promote": (promote, 12),
    "begin_reserved": (begin_reserved, 2),
    "read": (read, 6),
    "start": (start, 14),
    "copy": (copy, 12),
    "complete": (complete, 13),
    "foreign_completion": (foreign, 1),
    "poll": (poll, 9),
    "finish": (finish, 6),
    "cancel": (cancel, 1.2),
    "reset": (reset, 0.2),
    "move_on": (move_on, 0.25),
    "recycle": (recycle, 0.7),
    "free": (free, 4),
    "expire": (expire, 5),
}
