"""Actions on copies: they come down, leave, are published, fenced off, damaged and collected."""

from __future__ import annotations

from xxhash import xxh3_128_digest

from kvstrata.contract.capability import DEVICE, FILES, HOST
from kvstrata.contract.states import FileReplicaState, ResidencyState
from kvstrata.errors import StateError
from kvstrata.lab.soak.invariants import copies
from kvstrata.lab.soak.reference import require
from kvstrata.lab.soak.rows import LAYERS
from kvstrata.lab.soak.world import World
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.host_cache import DemoteOutcome

__all__ = ["ACTIONS", "write_next"]

_DONE = (DemoteOutcome.COPIED, DemoteOutcome.PRESENT)


def demote(world: World) -> str:
    """One segment is copied to the host tier, because it may leave the device, or because it must."""
    picked = _resident(world)
    if picked is None:
        return "idle"
    record, layer = picked
    needed = world.rng.random() < 0.5
    try:
        outcome = world.cache.demote(record, layer, required=needed)
    except StateError:
        require(world.raced, "a demotion was refused although nothing came between")
        return "raced"
    if not world.raced:
        require((outcome in _DONE) == (HOST in copies(world, record, layer)), "a demotion says", outcome)
        require(record.grants[layer] is not None, "a demotion took the device's copy along")
    return str(outcome)


def demote_whole(world: World) -> str:
    """All segments of a chunk get a copy in the host tier."""
    picked = _resident(world)
    if picked is None:
        return "idle"
    record, _ = picked
    try:
        done = world.cache.demote_whole(record)
    except StateError:
        require(world.raced, "a demotion was refused although nothing came between")
        return "raced"
    if done and not world.raced:
        require(all(HOST in copies(world, record, each) for each in range(LAYERS)), "not all was demoted")
    return "all" if done else "some"


def evict(world: World) -> str:
    """A segment leaves the device, if enough other copies survive it; else that is refused."""
    picked = _resident(world)
    return "idle" if picked is None else _evict(world, *picked, DEVICE)


def evict_host(world: World) -> str:
    """A segment leaves the host tier, as above."""
    there = [(r, layer) for r in world.directory for layer in range(LAYERS) if r.host.grants[layer] is not None]
    if not there:
        return "idle"
    return _evict(world, *world.rng.choice(there), HOST)


def _evict(world: World, record: ChunkRecord, layer: int, tier: str) -> str:
    left = copies(world, record, layer) - {tier}
    may = len(left) >= world.setting.survivors
    call = world.directory.evict if tier == DEVICE else world.directory.evict_host
    refused = world.refused(lambda: call(record, layer))
    require(refused != may, "an eviction was refused or done with", sorted(left), "left of", world.setting.survivors)
    grants = record.grants if tier == DEVICE else record.host.grants
    require((grants[layer] is None) == may, "an eviction left a copy, or a refused one took it")
    return "refused" if refused else "evicted"


def make_room(world: World) -> str:
    """A chunk makes room as an engine lets it: a copy to the host tier where there is room, then off the device."""
    records = [record for record in world.directory if record.resident and record.evictable]
    if not records:
        return "idle"
    record = world.rng.choice(records)
    for layer in range(LAYERS):
        if record.grants[layer] is not None and record.residency[layer] in _SETTLED:
            world.refused(lambda at=layer: world.cache.demote(record, at))  # type: ignore[misc]
            _evict(world, record, layer, DEVICE)
    return "made"


_SETTLED = (ResidencyState.DEVICE_VISIBLE, ResidencyState.LOWER_VALID)


def submit(world: World) -> str:
    """A whole chunk is queued to be written."""
    states = (FileReplicaState.ABSENT, FileReplicaState.FAILED, FileReplicaState.REVOKED)
    whole = [each for each in world.directory if each.resident == LAYERS and each.file in states]
    if not whole:
        return "idle"
    record = world.rng.choice(whole)
    world.publisher.submit(record)
    world.writing.append((record, [grant for grant in record.grants if grant is not None]))
    return "queued"


def write(world: World) -> str:
    """The publisher writes what is next in its queue."""
    return write_next(world) if world.writing else "idle"


def write_next(world: World) -> str:
    """Write one chunk and compare what the tier has then with what the record says."""
    record, _ = world.writing[0]
    before = len(world.injector.log)
    require(world.publisher.run_one(), "a chunk was queued and is not written")
    world.writing.pop(0)
    lost = any(entry.operation == "write" and entry.fault == "lose" for entry in world.injector.log[before:])
    if lost:
        world.harm(record.digest)
    if record.file is FileReplicaState.PUBLISHED:
        present = world.tier.has(record.digest)
        require(present or lost or world.raced, "a chunk counts as published and is not there")
        if not present:
            world.harm(record.digest)
    return str(record.file) + ("_nowhere" if lost else "")


def fence(world: World) -> str:
    """An authority elsewhere overrules a host replica: from then on its bytes are of another history."""
    chosen = [
        record
        for record in world.directory
        if any(record.host.grants)
        and world.fenced.get(record) != record.host.generation
        and record.authority != HOST
        and all(
            len(copies(world, record, layer) - {HOST}) >= 1 or HOST not in copies(world, record, layer)
            for layer in range(LAYERS)
        )
    ]
    if not chosen:
        return "idle"
    record = world.rng.choice(chosen)
    world.fenced[record] = record.host.generation
    record.host.epoch -= 1
    for layer, grant in enumerate(record.host.grants):
        if grant is not None and not _leased(world, grant.slot):
            other = bytes(byte ^ 0x55 for byte in world.truths[record.digest].segments[layer])
            world.host.backing.writable(grant.slot)[:] = other
            record.host.checksums[layer] = xxh3_128_digest(other)
    return "fenced"


def damage_host(world: World) -> str:
    """A bit of the host tier's memory is another."""
    there = [
        (record, layer, grant)
        for record in world.directory
        for layer, grant in enumerate(record.host.grants)
        if grant is not None and not _leased(world, grant.slot)
    ]
    if not there:
        return "idle"
    record, layer, grant = world.rng.choice(there)
    world.harm(record.digest, layer)
    slot = world.host.backing.writable(grant.slot)
    slot[world.rng.randrange(slot.nbytes)] ^= 1 << world.rng.randrange(8)
    return "flipped"


def damage_file(world: World) -> str:
    """A chunk of the durable tier has another bit, or ends early."""
    names = list(world.tier.list())
    if not names:
        return "idle"
    digest, layer, cut = world.rng.choice(names), world.rng.randrange(LAYERS), world.rng.random() < 0.4
    world.harm(digest, layer)
    world.tier.damage(digest, layer, world.rng.randrange(10**6), cut=cut)
    return "cut" if cut else "flipped"


def collect(world: World) -> str:
    """A durable chunk that no record stands for is removed."""
    unused = [digest for digest in world.tier.list() if world.directory.find(digest) is None]
    if not unused:
        return "idle"
    digest = world.rng.choice(unused)
    world.promoter.files.forget(digest)
    require(world.faulty.revoke(digest), "a chunk that is there was not removed")
    return "removed"


def check(world: World) -> str:
    """A chunk's file is verified, and taken out of use where it is damaged."""
    chosen = [record for record in world.directory if record.file is FileReplicaState.PUBLISHED]
    if not chosen:
        return "idle"
    record = world.rng.choice(chosen)
    truth = world.truths[record.digest]
    sound = all(world.tier.content(record.digest, layer) == truth.segments[layer] for layer in range(LAYERS))
    if sound:
        return "sound"
    world.revoke(record.digest)
    require(FILES not in copies(world, record, 0), "a revoked replica counts as valid")
    return "revoked"


def _resident(world: World) -> tuple[ChunkRecord, int] | None:
    there = [
        (record, layer) for record in world.directory for layer in range(LAYERS) if record.grants[layer] is not None
    ]
    settled = [(record, layer) for record, layer in there if record.residency[layer] in _SETTLED]
    return world.rng.choice(settled) if settled else None


def _leased(world: World, slot: int) -> bool:
    return any(arena is world.host and grant.slot == slot for each in world.held for arena, grant, _ in each.slots)


ACTIONS = {
    "demote": (demote, 5),
    "demote_whole": (demote_whole, 2),
    "evict": (evict, 6),
    "evict_host": (evict_host, 1.5),
    "make_room": (make_room, 4),
    "submit": (submit, 5),
    "write": (write, 5),
    "fence": (fence, 0.7),
    "damage_host": (damage_host, 0.5),
    "damage_file": (damage_file, 0.5),
    "collect": (collect, 1),
    "verify": (check, 0.7),
}
