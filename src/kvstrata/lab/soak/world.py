"""The parts of one simulated process: the store's own, on a clock and a tier that the simulator moves."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial

from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.credits import Credits, PathRate
from kvstrata.errors import StateError
from kvstrata.lab.soak.memory_tier import MemoryTier
from kvstrata.lab.soak.reference import Flight, Held, Line, Passage, StaleGrant
from kvstrata.lab.soak.rows import LAYERS, LAYOUT, Truth
from kvstrata.store.admission import AdmissionConfig, AdmissionFilter
from kvstrata.store.directory import ChunkRecord, Directory, SegmentKey
from kvstrata.store.eviction import make_policy
from kvstrata.store.host_cache import HostCache
from kvstrata.store.leases import LeaseTable
from kvstrata.store.promotion import Promoter, Promotion
from kvstrata.store.publication import Publisher
from kvstrata.store.publication_queue import chunk_credits
from kvstrata.store.segment_copier import OpenedEachTime, SegmentCopier
from kvstrata.store.transfer_records import CopyEvent
from kvstrata.store.transfers import TransferQueue
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan
from kvstrata.tiers.faulty import FaultyBacking, FaultyTier
from kvstrata.tiers.memory import Grant, HostBacking, MemoryArena

__all__ = ["SEGMENT", "Setting", "SimulatedClock", "World", "peek"]

SEGMENT = LAYOUT.segment_bytes
_TIMEOUT_S = 4.0
_RATES = {
    Fault.DELAY: 0.02,
    Fault.SHORTEN: 0.01,
    Fault.CORRUPT: 0.02,
    Fault.LOSE: 0.02,
    Fault.DUPLICATE: 0.02,
    Fault.FILL_UP: 0.02,
    Fault.DIE: 0.0004,
}


class SimulatedClock:
    """Seconds that pass only when the simulator says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs between seeds. slots: of device and host. chunks: that fit the tier. rates: of faults in it."""

    device_slots: int
    host_slots: int
    chunks: int
    survivors: int
    policy: str
    admission: bool
    wipe: bool
    credits: Credits
    rates: Mapping[Fault, float]

    @classmethod
    def draw(cls, rng: random.Random) -> Setting:
        """A setting at random: small enough that everything runs short."""
        window = rng.randint(4, 24) * SEGMENT
        return cls(
            device_slots=rng.randint(12, 44),
            host_slots=rng.randint(3, 14),
            chunks=rng.randint(6, 40),
            survivors=2 if rng.random() < 0.15 else 1,
            policy=rng.choice(["lru", "lfu", "fifo", "expected_value"]),
            admission=rng.random() < 0.5,
            wipe=rng.random() < 0.3,
            credits=Credits(window, rng.randint(4, 24) * SEGMENT, window, rng.randint(3, 12)),
            rates=_RATES if rng.random() < 0.85 else {},
        )


class _YieldingBacking(HostBacking):
    """Host memory whose copies are seen by others half done."""

    def __init__(self, slots: int, between: Callable[[], None]) -> None:
        super().__init__(SEGMENT, slots)
        self._between = between

    def flush(self, slot: int) -> None:
        self._between()


class _HostMemory(FaultyBacking):
    """spoiled(slot): told when memory failed after it had been filled."""

    def __init__(self, backing: HostBacking, injector: FaultInjector, spoiled: Callable[[int], None]) -> None:
        super().__init__(backing, injector)
        self._spoiled = spoiled

    def readable(self, slot: int) -> memoryview:
        before = len(self.injector.log)
        view = super().readable(slot)
        if any(each.fault is not Fault.DELAY for each in self.injector.log[before:]):
            self._spoiled(slot)
        return view


def peek(arena: MemoryArena, slot: int) -> bytes:
    """What is in a slot, without a fault of its own."""
    backing = arena.backing
    return bytes((backing.backing if isinstance(backing, FaultyBacking) else backing).readable(slot))


class World:
    """See the modules of actions for what is done to it, and `invariants` for what must hold.

    truths: every chunk that was ever sealed. harmed: segments of which a copy was damaged or lost on purpose, so that
    they may end without one. spoiled: host slots whose memory failed. fenced: generations of host replicas that an
    authority elsewhere has overruled. meanwhile(): what other threads do while one copies; set by the simulator. raced:
    whether they did, in this step. dead: whether the process was killed.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self.setting = Setting.draw(self.rng)
        self.clock = SimulatedClock()
        self.counts: Counter[str] = Counter()
        self.meanwhile: Callable[[], None] = lambda: None
        self.truths: dict[bytes, Truth] = {}
        self.harmed: set[SegmentKey] = set()
        self.tier = MemoryTier(self.setting.chunks, self._between)
        plan = FaultPlan(seed, self.setting.rates, delay_s=0.05)
        self.injector = FaultInjector(plan, sleep=self.clock.advance, die=self._die)
        self.faulty = FaultyTier(self.tier, self.injector)
        self.number = 0
        self.raced = False
        self.dead = False
        self.generation = 0
        self.boot()

    def boot(self) -> None:
        """A new process over the same tier: nothing of memory is left, and generations go on."""
        setting = self.setting
        device = MemoryArena(SEGMENT, HostBacking(SEGMENT, setting.device_slots), wipe=setting.wipe)
        # A slot is zeroed under its arena's lock, where nobody comes between.
        between = (lambda: None) if setting.wipe else self._between
        memory = _HostMemory(_YieldingBacking(setting.host_slots, between), self.injector, self._spoil)
        host = MemoryArena(SEGMENT, memory, wipe=setting.wipe)
        self.directory = Directory(device, LAYERS, host, generation=self.generation, survivors=setting.survivors)
        admission = AdmissionFilter(AdmissionConfig(counters=16, sample=160)) if setting.admission else None
        renew = partial(make_policy, setting.policy)
        self.cache = HostCache(self.directory, renew(), admission, self.clock, renew)
        self.promoter = Promoter(
            self.directory, self.faulty, LAYOUT, 0, self.clock, _TIMEOUT_S, self.cache, setting.credits
        )
        self.bare = TransferQueue(
            "files -> bare",
            self.promoter.pool,
            SegmentCopier(OpenedEachTime(self.faulty)),
            rate=lambda: PathRate(0.01, 100_000.0),
            clock=self.clock,
        )
        self.leases = LeaseTable(self.clock)
        two = chunk_credits(LAYERS * SEGMENT)
        self.publisher = Publisher(self.directory, self.faulty, LAYOUT, self.clock, credits=two + two)
        self.cache_generation = 0
        self.lines: list[Line] = []
        self.pins: list[ChunkRecord] = []
        self.reserved: list[list[Promotion]] = []
        self.flights: list[Flight] = []
        self.awaited: list[Flight] = []
        self.passages: list[Passage] = []
        self.due: list[tuple[float, Passage, CopyEvent]] = []
        self.kept: list[tuple[tuple[Grant, ...], tuple[Hashable, ...]]] = []
        self.held: list[Held] = []
        self.writing: list[tuple[ChunkRecord, list[Grant]]] = []
        self.stale: deque[StaleGrant] = deque(maxlen=64)
        self.fenced: dict[ChunkRecord, int] = {}
        self.spoiled: set[Grant] = set()

    @property
    def host(self) -> MemoryArena:
        """The arena of the host tier."""
        return self.cache.arena

    def count(self, name: str) -> None:
        """One more of `name`."""
        self.counts[name] += 1

    def harm(self, digest: bytes, *layers: int) -> None:
        """Note that a copy of these layers, or of all, was damaged or lost on purpose."""
        self.harmed.update((digest, layer) for layer in layers or range(LAYERS))

    def records(self) -> list[ChunkRecord]:
        """Chunks in use, oldest first."""
        return list(self.directory)

    def revoke(self, digest: bytes) -> None:
        """What an engine does about a chunk that was found damaged."""
        self.harm(digest)
        self.count("tier.revoke")
        self.promoter.files.forget(digest)
        self.faulty.revoke(digest)
        record = self.directory.find(digest)
        if record is not None and record.file is FileReplicaState.PUBLISHED:
            self.directory.mark(record, FileReplicaState.REVOKED)

    def _between(self) -> None:
        self.meanwhile()

    def _spoil(self, slot: int) -> None:
        self.count("host_memory_failed")
        for record in self.directory:
            for layer, grant in enumerate(record.host.grants):
                if grant is not None and grant.slot == slot:
                    self.harm(record.digest, layer)
                    self.spoiled.add(grant)

    def _die(self) -> None:
        self.dead = True

    def refused(self, call: Callable[[], object]) -> bool:
        """Whether the store refuses `call` as one at the wrong time."""
        try:
            call()
        except StateError:
            return True
        return False
