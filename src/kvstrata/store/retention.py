"""What stays in a durable tier under a cap: makes room by evicting whole chunks, or says why it cannot.

Nothing is evicted for a refusal: what would go is worked out first, and when that is not enough everything stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.cost.bounds import require_finite
from kvstrata.errors import Reason
from kvstrata.store.admission import Admission, AdmissionFilter, AdmissionOutcome, Contender
from kvstrata.store.eviction import LruConfig, PolicyConfig, Usage, make_policy
from kvstrata.store.leaf_first import Hold, LeafFirst, StoredChunk

__all__ = ["EvictOutcome", "Eviction", "Held", "Retention", "RoomOutcome", "RoomReceipt", "StoreFull"]


class EvictOutcome(StrEnum):
    """What became of one eviction. EVICTED: its bytes are free. GONE: somebody else removed it meanwhile. HELD: it is
    needed by now, and stays."""

    EVICTED = "evicted"
    GONE = "gone"
    HELD = "held"


class RoomOutcome(StrEnum):
    """MADE: there is room. DECLINED: the newcomer is worth no more than what would leave. STORE_FULL: what may leave is
    not enough."""

    MADE = "made"
    DECLINED = "declined"
    STORE_FULL = "store_full"


@dataclass(frozen=True, slots=True)
class Eviction:
    """A chunk that left, its bytes, and why it did: its place in the order of `policy`, where 0 is the first to leave,
    with the uses and the latest use (seconds of the catalog's clock) that put it there. A chunk of a lower rank that
    stayed was held, or a parent of one that stays.
    """

    chunk: bytes
    nbytes: int
    policy: str
    rank: int
    uses: int
    last_used: float


@dataclass(frozen=True, slots=True)
class Held:
    """Chunks that may not leave for one cause, and their bytes."""

    chunks: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreFull:
    """Why there is no room. evictable_bytes: what could leave. pinned, last_authority: see `Hold`. blocked: free, but
    continued by what is held or about to be written; or held since the catalog was asked. missing_bytes: by how much a
    cap would have to grow.
    """

    needed_bytes: int
    evictable_bytes: int
    pinned: Held
    last_authority: Held
    blocked: Held

    @property
    def reason(self) -> Reason:
        return Reason.STORE_FULL

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.evictable_bytes

    @property
    def cause(self) -> str:
        """The sentence for a `StoreError`."""
        return (
            f"{self.needed_bytes} bytes are needed and {self.evictable_bytes} can leave: "
            f"{self.pinned.nbytes} bytes in {self.pinned.chunks} chunks are pinned, "
            f"{self.last_authority.nbytes} in {self.last_authority.chunks} are the only copy of rows in use, "
            f"{self.blocked.nbytes} in {self.blocked.chunks} are what those, or the new chunk, continue"
        )

    @property
    def next_step(self) -> str:
        """What would do."""
        return f"raise the cap by {self.missing_bytes} bytes, or remove sessions with `kvstrata store rm NAME`"


@dataclass(frozen=True, slots=True)
class RoomReceipt:
    """What was done for `needed_bytes`. freed_bytes: of `evicted` and of chunks that others removed meanwhile.

    admission: what the filter said, when it was asked. full: set for STORE_FULL; chunks that were evicted all the same
    left before others turned out to be held by now.
    """

    outcome: RoomOutcome
    needed_bytes: int
    freed_bytes: int
    evicted: tuple[Eviction, ...] = ()
    admission: Admission | None = None
    full: StoreFull | None = None

    @property
    def reason(self) -> Reason | None:
        """NOT_ADMITTED, STORE_FULL, or `None` when room was made."""
        if self.outcome is RoomOutcome.MADE:
            return None
        return Reason.STORE_FULL if self.outcome is RoomOutcome.STORE_FULL else Reason.NOT_ADMITTED


class Retention:
    """Makes room in one durable tier. Not safe for several threads: whoever reserves room holds the tier's lock.

    chunks: all published chunks, held ones included; asked anew each time, because other processes use them too.
    evict: removes one chunk unless it is held by now; blocks. policy: name or configuration of an eviction policy.
    admission: judges newcomers; `None` admits all. saving_s: seconds that one use of a chunk saves, which a policy may
    weigh; equal for all when not given. extra_bytes: freed beyond what is needed, as far as there is something, so that
    the order is not worked out for every chunk: that takes O(n log n).
    Errors: `ConfigurationError` for a policy or a value that cannot be.
    """

    def __init__(
        self,
        chunks: Callable[[], Iterable[StoredChunk]],
        evict: Callable[[bytes], EvictOutcome],
        *,
        policy: str | PolicyConfig | None = None,
        admission: AdmissionFilter | None = None,
        saving_s: Callable[[StoredChunk], float] | None = None,
        extra_bytes: int = 0,
    ) -> None:
        require_finite("extra_bytes", extra_bytes)
        self._policy = LruConfig() if policy is None else policy
        self._policy_name = type(make_policy(self._policy)).__name__
        self._chunks = chunks
        self._evict = evict
        self._admission = admission
        self._saving_s = saving_s or _equal
        self._extra_bytes = extra_bytes

    def make_room(self, nbytes: int, newcomer: Contender | None = None, parent: bytes = b"") -> RoomReceipt:
        """Free at least `nbytes` bytes, blocking, or say why not.

        newcomer: the chunk that wants them; without it nobody is judged, as for a session that the user saves. parent:
        of the newcomer; it stays, and so does all that it continues.
        Errors: `ConfigurationError` unless `nbytes` is positive; what `evict` raises, with what left before it gone.
        """
        require_finite("nbytes", nbytes, least=1)
        chunks = list(self._chunks())
        leaves = LeafFirst(chunks, self._rank(chunks), parent)
        planned = _up_to(leaves.copy().drain(), nbytes)
        if sum(one.nbytes for one in planned) < nbytes:
            return RoomReceipt(RoomOutcome.STORE_FULL, nbytes, 0, full=_full(chunks, planned, nbytes))
        admission = None
        if self._admission is not None and newcomer is not None:
            victims = [Contender(one.chunk, max(0.0, self._saving_s(one))) for one in planned]
            admission = self._admission.decide(newcomer, victims)
            if admission.outcome is not AdmissionOutcome.ADMITTED:
                return RoomReceipt(RoomOutcome.DECLINED, nbytes, 0, admission=admission)
        return self._leave(chunks, leaves, nbytes, admission)

    def _rank(self, chunks: Sequence[StoredChunk]) -> Sequence[bytes]:
        free = [one for one in chunks if one.hold is Hold.FREE]
        policy = make_policy(self._policy)
        policy.restore(
            Usage(one.chunk, one.nbytes, one.created, one.last_used, one.uses, self._saving_s(one)) for one in free
        )
        return policy.victims(count=len(free)).keys if free else ()

    def _leave(
        self, chunks: Sequence[StoredChunk], leaves: LeafFirst, nbytes: int, admission: Admission | None
    ) -> RoomReceipt:
        evicted: list[Eviction] = []
        left: list[StoredChunk] = []
        freed = 0
        while freed < nbytes + self._extra_bytes and (one := leaves.take()) is not None:
            outcome = self._evict(one.chunk)
            if outcome is EvictOutcome.HELD:
                continue
            leaves.left(one)
            left.append(one)
            freed += one.nbytes
            if outcome is EvictOutcome.EVICTED:
                rank = leaves.ranks[one.chunk]
                evicted.append(Eviction(one.chunk, one.nbytes, self._policy_name, rank, one.uses, one.last_used))
        if freed >= nbytes:
            return RoomReceipt(RoomOutcome.MADE, nbytes, freed, tuple(evicted), admission)
        full = _full(chunks, left, nbytes)
        return RoomReceipt(RoomOutcome.STORE_FULL, nbytes, freed, tuple(evicted), admission, full)


def _equal(one: StoredChunk) -> float:
    return 1.0


def _up_to(leaves: Iterable[StoredChunk], nbytes: int) -> list[StoredChunk]:
    taken, total = [], 0
    for one in leaves:
        taken.append(one)
        total += one.nbytes
        if total >= nbytes:
            break
    return taken


def _full(chunks: Iterable[StoredChunk], leaving: Iterable[StoredChunk], nbytes: int) -> StoreFull:
    out = {one.chunk: one.nbytes for one in leaving}
    stay = [one for one in chunks if one.chunk not in out]
    held = {}
    for hold in Hold:
        sizes = [one.nbytes for one in stay if one.hold is hold]
        held[hold] = Held(len(sizes), sum(sizes))
    return StoreFull(nbytes, sum(out.values()), held[Hold.PINNED], held[Hold.LAST_AUTHORITY], held[Hold.FREE])
