"""Actions on leases, and attempts by those who come too late."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.contract.states import ResidencyState
from kvstrata.errors import Reason, StateError
from kvstrata.lab.soak.reference import Held, StaleGrant, require
from kvstrata.lab.soak.rows import LAYERS
from kvstrata.lab.soak.world import World, peek
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["ACTIONS", "leave_one"]

_OWNERS = ("a", "b", "c")


def grant(world: World) -> str:
    """A look-up leases the slots of a segment, on the device, in the host tier, or both."""
    chosen = [
        (record, layer, device, host)
        for record in world.directory
        for layer in range(LAYERS)
        for device, host in [(record.grants[layer], record.host.grants[layer])]
        if device is not None or host is not None
    ]
    if not chosen or len(world.held) >= 8:
        return "idle"
    record, layer, device, host = world.rng.choice(chosen)
    slots: list[tuple[MemoryArena, Grant]] = []
    if device is not None:
        slots.append((world.directory.arena, device))
    if host is not None:
        slots.append((world.host, host))
    seconds = world.rng.choice((0.05, 0.5, 3.0))
    lease = world.leases.grant(world.rng.choice(_OWNERS), record.key(layer), slots, seconds)
    held = [(arena, each, peek(arena, each.slot)) for arena, each in slots]
    world.held.append(Held(lease, world.clock.now + seconds, held))
    return "granted"


def enter(world: World) -> str:
    """A read begins under a lease, if that still counts."""
    if not world.held:
        return "idle"
    each = world.rng.choice(world.held)
    valid = _valid(world, each)
    reader = world.leases.reading(each.lease)
    try:
        reader.__enter__()
    except StateError as error:
        require(error.reason is Reason.LEASE_EXPIRED and not valid, "a lease was refused that counts")
        each.ended = True
        _prune(world)
        return "expired"
    require(valid, "a lease was used after its end")
    each.readers.append(reader)
    return "entered"


def leave(world: World) -> str:
    """A read ends; what it read counts only if the lease still does."""
    reading = [each for each in world.held if each.readers]
    return leave_one(world, world.rng.choice(reading)) if reading else "idle"


def leave_one(world: World, each: Held) -> str:
    """End one read under a lease."""
    for arena, held, wanted in each.slots:
        failed = arena is world.host and held in world.spoiled
        require(failed or peek(arena, held.slot) == wanted, "rows changed under a reader")
    valid = _valid(world, each)
    reader = each.readers.pop(world.rng.randrange(len(each.readers)))
    try:
        reader.__exit__(None, None, None)
    except StateError as error:
        require(error.reason is Reason.LEASE_EXPIRED and not valid, "a read was refused whose lease counts")
        each.ended = True
        _prune(world)
        return "expired"
    require(valid, "a read counts whose lease had ended")
    return "read"


def renew(world: World) -> str:
    """A reader asks for more time."""
    if not world.held:
        return "idle"
    each = world.rng.choice(world.held)
    valid, seconds = _valid(world, each), world.rng.uniform(0.1, 2.0)
    if world.refused(lambda: world.leases.renew(each.lease, seconds)):
        require(not valid, "a lease was not renewed that counts")
        each.ended = True
        _prune(world)
        return "expired"
    require(valid, "a lease was renewed after its end")
    each.expires = world.clock.now + seconds
    return "renewed"


def release(world: World) -> str:
    """A reader gives its lease up, or a request's leases are revoked."""
    if not world.held:
        return "idle"
    if world.rng.random() < 0.3:
        owner = world.rng.choice(_OWNERS)
        mine = [each for each in world.held if each.lease.owner == owner]
        require(world.leases.revoke(owner) == len(mine), "not all leases of an owner were revoked")
    else:
        mine = [world.rng.choice(world.held)]
        world.leases.release(mine[0].lease)
    for each in mine:
        each.ended = True
    _prune(world)
    return "released" if mine else "none"


def expire(world: World) -> str:
    """Leases that are over are revoked."""
    due = [each for each in world.held if not each.ended and world.clock.now >= each.expires]
    found = {lease.number for lease in world.leases.expire()}
    # A slot that is zeroed may take time, in which others end.
    later = [each for each in world.held if not each.ended and world.clock.now >= each.expires]
    require(found >= {each.lease.number for each in due}, "a lease did not expire")
    require(found <= {each.lease.number for each in later}, "a lease expired too early")
    due = [each for each in later if each.lease.number in found]
    for each in due:
        each.ended = True
    _prune(world)
    return "expired" if due else "none"


def intrude(world: World) -> str:
    """Somebody comes with a reservation that stands no longer."""
    if not world.stale:
        return "idle"
    old = world.rng.choice(list(world.stale))
    arena, grant, owner = old.arena, old.grant, old.owner
    calls: dict[str, Callable[[], object]] = {"release": lambda: arena.release(grant)}
    if arena.owner(grant) is None:
        # Else its owner gave it up and a reader still keeps it, who may.
        calls["publish"] = lambda: arena.publish(grant, owner)
        calls["rename"] = lambda: arena.rename(grant, owner, owner)
        calls["hold"] = lambda: arena.hold(grant, owner)
        calls["let_go"] = lambda: arena.let_go(grant)
        calls |= _late_publication(world, old)
    name = world.rng.choice(list(calls))
    require(world.refused(calls[name]), "a reservation that stands no longer was accepted by", name)
    return name


def _late_publication(world: World, old: StaleGrant) -> dict[str, Callable[[], object]]:
    if not isinstance(old.owner, tuple) or len(old.owner) != 2:
        return {}
    digest, layer = old.owner
    record = world.directory.find(digest)
    if record is None or record.residency[layer] is ResidencyState.PROMOTE_RESERVED:
        return {}
    return {"directory": lambda: world.directory.publish(record, layer, old.grant)}


def _valid(world: World, each: Held) -> bool:
    return not each.ended and world.clock.now < each.expires


def _prune(world: World) -> None:
    world.held = [each for each in world.held if not each.gone]


ACTIONS = {
    "lease": (grant, 3),
    "lease_enter": (enter, 4),
    "lease_leave": (leave, 4),
    "lease_renew": (renew, 1),
    "lease_release": (release, 1),
    "lease_expire": (expire, 1),
    "intrude": (intrude, 4),
}
