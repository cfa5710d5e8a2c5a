"""What must hold after every step, compared with plain records; bytes of everything every so many steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from kvstrata.contract.capability import DEVICE, FILES, HOST
from kvstrata.contract.states import FileReplicaState, ResidencyState, SlotState
from kvstrata.cost.credits import Credits
from kvstrata.lab.soak.reference import StaleGrant, require
from kvstrata.lab.soak.rows import LAYERS, SIZE, segment
from kvstrata.lab.soak.settlement import settle
from kvstrata.lab.soak.world import SEGMENT, World, peek
from kvstrata.store.directory import ChunkRecord
from kvstrata.tiers.memory import Grant, MemoryArena

__all__ = ["Invariants", "copies", "quiet"]

_READABLE = frozenset({ResidencyState.DEVICE_VISIBLE, ResidencyState.LOWER_VALID})


def copies(world: World, record: ChunkRecord, layer: int) -> frozenset[str]:
    """Tiers that have a valid copy of one segment, as the reference counts them."""
    found = set()
    if record.device.grants[layer] is not None:
        found.add(DEVICE)
    if record.host.grants[layer] is not None and world.fenced.get(record) != record.host.generation:
        found.add(HOST)
    if record.durable.state is FileReplicaState.PUBLISHED:
        found.add(FILES)
    return frozenset(found)


class Invariants:
    """Remembers what was, so that what must only grow is seen to, and what vanishes is accounted for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._copies: dict[tuple[ChunkRecord, int], frozenset[str]] = {}
        self._epochs: dict[ChunkRecord, tuple[int, ...]] = {}
        self._claims: dict[Grant, Hashable] = {}
        self._generations: list[int] = []
        self._host_generations: list[int] = []
        self._directory_generation = 0

    def forget(self) -> None:
        """The process ended; its successor starts from the tier. The directory's generation goes on."""
        self._copies, self._epochs, self._claims = {}, {}, {}
        self._generations, self._host_generations = [], []

    def quick(self) -> None:
        """Owners, users, survival, generations, credits and leases. Errors: `BrokenInvariantError`."""
        settle(self.world)
        self._device_slots()
        self._host_slots()
        self._users()
        self._survival()
        self._monotonic()
        self._credits()
        self._leases()

    def thorough(self) -> None:
        """As `quick`, and every byte that could be read. Errors: `BrokenInvariantError`."""
        self.quick()
        world = self.world
        for record in world.directory:
            self.record(record)
        for line in world.lines:
            history = line.history
            require(history.frontier == len(line.states), "a frontier moved:", history.frontier, len(line.states))
            for chunk in history.tail:
                rows = line.states[chunk.index * SIZE : (chunk.index + 1) * SIZE]
                for layer, grant in enumerate(chunk.grants):
                    found = peek(world.directory.arena, grant.slot)
                    wanted = segment(rows, layer)
                    if len(rows) == SIZE:
                        require(found == wanted, "a full open chunk has other rows, layer", layer)
                    else:
                        require(_same_rows(found, wanted), "an open chunk has other rows, layer", layer)
        self._heal()
        arena = world.directory.arena
        for slot in range(arena.slots if arena.wipe else 0):
            if arena.state(slot) is SlotState.FREE:
                require(not any(peek(arena, slot)), "a free slot was not zeroed:", slot)

    def record(self, record: ChunkRecord) -> None:
        """Every copy of one chunk that counts as valid has the right bytes, and those that do not are not chosen."""
        world, directory = self.world, self.world.directory
        truth = world.truths[record.digest]
        require(record.identity == truth.identity, "a record has another identity")
        for layer in range(LAYERS):
            wanted, valid = truth.segments[layer], copies(world, record, layer)
            by_tier = {replica.tier: record.valid(replica, layer) for replica in record.replicas}
            require({tier for tier, it in by_tier.items() if it} == valid, "valid copies are", by_tier, "not", valid)
            chosen = directory.choose(record, layer)
            require((chosen is not None) == bool(valid), "a copy was chosen of none, or none of some")
            require(chosen is None or chosen.tier in valid, "a copy was chosen that is not valid:", chosen)
            device, host = record.grants[layer], record.host.grants[layer]
            if device is not None:
                found = peek(directory.arena, device.slot)
                require(found == wanted, "wrong bytes are readable on the device, layer", layer)
                require(record.residency[layer] not in (ResidencyState.DEVICE_RELEASED,), "a copy counts as gone")
            else:
                require(record.residency[layer] not in _READABLE, "a segment counts as there without a slot")
            harmed = (record.digest, layer) in world.harmed
            if host is not None and HOST in valid:
                sound = peek(world.host, host.slot) == wanted
                require(sound or harmed, "wrong bytes are readable in the host tier, layer", layer)
            if FILES in valid:
                require(
                    world.tier.content(record.digest, layer) == wanted or harmed,
                    "the durable copy is wrong, layer",
                    layer,
                )
        if record.authority:
            authority = next(replica for replica in record.replicas if replica.tier == record.authority)
            whole = authority is record.durable or None not in authority.grants
            require(whole and record.valid(authority), "the authority is not whole and valid:", record.authority)

    def _device_slots(self) -> None:
        world, arena = self.world, self.world.directory.arena
        claims: dict[Grant, tuple[Hashable, SlotState]] = {}

        def claim(grant: Grant, owner: Hashable, state: SlotState) -> None:
            require(grant not in claims, "a slot has two owners:", grant, owner, claims.get(grant))
            claims[grant] = owner, state

        for record in world.directory:
            for layer, grant in enumerate(record.grants):
                if grant is not None:
                    claim(grant, (record.digest, layer), SlotState.PUBLISHED)
        for line in world.lines:
            for chunk in line.history.tail:
                for grant in chunk.grants:
                    claim(grant, chunk.owner, SlotState.PUBLISHED)
        for promotions in world.reserved:
            for item in promotions:
                claim(item.grant, (item.record.digest, item.layer), SlotState.RESERVED)
        for flight in world.flights:
            if not flight.recycled:
                for grant, owner in zip(flight.grants, flight.owners, strict=True):
                    if grant not in claims:  # else published, and interrupted before that was noted
                        claim(grant, owner, arena.state(grant.slot))
        for grants, owners in world.kept:
            for grant, name in zip(grants, owners, strict=True):
                claim(grant, name, SlotState.PUBLISHED)
        for grant, (owner, state) in claims.items():
            require(arena.belongs(grant, owner), "a slot changed hands:", grant, owner)
            require(arena.state(grant.slot) is state, "a slot is", arena.state(grant.slot), "not", state, owner)
        self._retire(arena, {grant: owner for grant, (owner, _) in claims.items()})
        self._account(arena, {grant.slot for grant in claims})

    def _retire(self, arena: MemoryArena, claims: dict[Grant, Hashable]) -> None:
        for grant in self._claims.keys() - claims.keys():
            self.world.stale.append(StaleGrant(arena, grant, self._claims[grant]))
        self._claims = claims

    def _host_slots(self) -> None:
        world, claimed = self.world, set()
        for record in world.directory:
            for layer, grant in enumerate(record.host.grants):
                if grant is not None:
                    require(grant.slot not in claimed, "a host slot has two owners:", grant)
                    require(world.host.belongs(grant, (record.digest, layer)), "a host slot changed hands:", grant)
                    require(world.host.state(grant.slot) is SlotState.PUBLISHED, "a host copy is not published")
                    claimed.add(grant.slot)
        self._account(world.host, claimed)

    def _account(self, arena: MemoryArena, claimed: set[int]) -> None:
        """Every slot is claimed, free, or kept by a reader after its owner gave it up."""
        held = {
            grant.slot for each in self.world.held if not each.gone for where, grant, _ in each.slots if where is arena
        }
        if arena is self.world.directory.arena:
            held |= {grant.slot for _, grants in self.world.writing for grant in grants}
        retired = set()
        for slot in range(arena.slots):
            state = arena.state(slot)
            if state is SlotState.RETIRED:
                retired.add(slot)
                require(slot in held, "a slot is kept for nobody:", slot)
            elif slot not in claimed:
                require(state is SlotState.FREE, "a slot was lost:", slot, state)
            if slot in held:
                require(state is not SlotState.FREE, "a slot was freed under its reader:", slot)
        used = len(claimed) + len(retired)
        require(arena.used_slots == used, "used slots are", arena.used_slots, "and accounted ones", used)

    def _users(self) -> None:
        world = self.world
        users = Counter(record for line in world.lines for record in line.history.chunks)
        users.update(world.pins)
        for record in world.directory:
            require(record.users == users[record], "users are", record.users, "not", users[record])
        require(len(world.directory) == len(users), "records are", len(world.directory), "not", len(users))

    def _survival(self) -> None:
        world, now = self.world, {}
        for record in world.directory:
            for layer in range(LAYERS):
                key = record, layer
                now[key] = found = copies(world, record, layer)
                before = self._copies.get(key)
                if not found and before:
                    require(
                        (record.digest, layer) in world.harmed, "the last valid copy was given up, it was in", before
                    )
                    world.count("lost")
        self._copies = now

    def _monotonic(self) -> None:
        world, directory = self.world, self.world.directory
        require(directory.generation >= self._directory_generation, "the directory's generation went back")
        self._directory_generation = world.generation = directory.generation
        seen = {}
        for record in directory:
            seen[record] = now = (record.epoch, record.generation, *(each.generation for each in record.replicas))
            before = self._epochs.get(record, now)
            require(all(a >= b for a, b in zip(now, before, strict=True)), "generations went back:", before, now)
            fenced = world.fenced.get(record)
            if fenced is not None:
                require(
                    record.host.generation > fenced or not record.valid(record.host), "a fenced replica was resurrected"
                )
            require(max(now) <= directory.generation or now[0] == max(now), "a generation was never issued:", now)
        self._epochs = seen
        world.fenced = {record: generation for record, generation in world.fenced.items() if record in seen}
        for arena, name in ((directory.arena, "_generations"), (world.host, "_host_generations")):
            following = arena.generations.tolist()
            earlier = getattr(self, name) or following
            require(all(a >= b for a, b in zip(following, earlier, strict=True)), "a slot's generation went back")
            setattr(self, name, following)

    def _credits(self) -> None:
        world, wanted = self.world, Credits()
        for flight in world.flights:
            wanted += Credits(staging=flight.staging, queue=1)
        for passage in world.passages:
            wanted += passage.credits
        pool = world.promoter.pool
        require(pool.reserved == wanted, "reserved credits are", pool.reserved, "not", wanted)
        total = Credits()
        for each in pool.outstanding:
            total += each.amount
        require(total == wanted, "outstanding credits are", total, "not", wanted)

    def _leases(self) -> None:
        world = self.world
        live = sum(not each.gone for each in world.held)
        require(len(world.leases) == live, "leases are", len(world.leases), "not", live)
        for each in world.held:
            require(each.lease.readers == len(each.readers), "readers are", each.lease.readers, len(each.readers))

    def _heal(self) -> None:
        """A damage is over once all copies that are left are sound."""
        world = self.world
        for digest, layer in sorted(world.harmed):
            wanted, record = world.truths[digest].segments[layer], world.directory.find(digest)
            stored = world.tier.content(digest, layer)
            if stored not in (None, wanted) or (stored is None and record is not None and record.valid(record.durable)):
                continue
            if record is not None:
                host = record.host.grants[layer]
                damaged = host is not None and peek(world.host, host.slot) != wanted
                if damaged or not copies(world, record, layer):
                    continue
            world.harmed.discard((digest, layer))


def quiet(world: World) -> None:
    """Nothing is out any more. Errors: `BrokenInvariantError`."""
    directory, pool = world.directory, world.promoter.pool
    require(len(directory) == 0, "records are left:", len(directory))
    require(directory.arena.used_slots == 0, "device slots are left:", directory.arena.used_slots)
    require(world.host.used_slots == 0, "host slots are left:", world.host.used_slots)
    require(not pool.outstanding and pool.free == pool.total, "credits are left:", pool.reserved)
    require(len(world.leases) == 0, "leases are left:", len(world.leases))
    for queue in (world.promoter.queue, world.bare):
        require(not queue.pending and not queue.book.waiters, "transfers are left:", queue.direction)
    written = world.publisher.pool
    require(world.publisher.pending == 0, "publications are left")
    require(not written.outstanding and written.free == written.total, "credits are left:", written.reserved)
    require(directory.arena.slots * SEGMENT > 0, "an arena without slots proves nothing")


def _same_rows(found: bytes, wanted: bytes) -> bool:
    """Places without a row are nobody's history: they may hold anything."""
    return all(not row or row == there for row, there in zip(_rows(wanted), _rows(found), strict=True))


def _rows(data: bytes) -> list[bytes]:
    return [b"" if not any(data[at : at + 16]) else data[at : at + 16] for at in range(0, len(data), 16)]
