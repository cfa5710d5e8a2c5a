"""Room under a store's cap: what may leave, in which order, and who leaves for a chunk that is about to be written."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.errors import Reason, StoreError
from kvstrata.store.admission import AdmissionFilter, Contender
from kvstrata.store.catalog import Catalog
from kvstrata.store.deletion import evict
from kvstrata.store.eviction import PolicyConfig
from kvstrata.store.leaf_first import Hold
from kvstrata.store.retention import EvictOutcome, Retention, RoomOutcome, RoomReceipt
from kvstrata.store.uses import ChunksInUse

__all__ = ["Room"]

_EXTRA = 20
_LARGE = 1 << 30
"""Under a large cap a twentieth of it is freed beyond what is needed, so that the order is not worked out for every
chunk."""


@dataclass(frozen=True, slots=True)
class _Stored:
    chunk: bytes
    parent: bytes
    nbytes: int
    created: float
    last_used: float
    uses: int
    hold: Hold


class Room:
    """Makes room in the durable tier of `catalog`. Thread-safe; blocks while chunks are removed.

    policy: name or configuration of an eviction policy. admission: judges newcomers; `None` admits all.
    max_bytes: the cap. in_use: whose idle leases end first. latest: the receipt of the latest call.
    """

    def __init__(
        self,
        catalog: Catalog,
        max_bytes: int,
        in_use: ChunksInUse,
        policy: str | PolicyConfig = "lru",
        admission: AdmissionFilter | None = None,
    ) -> None:
        self.latest: RoomReceipt | None = None
        self._catalog = catalog
        self._in_use = in_use
        self._lock = threading.Lock()
        extra = max_bytes // _EXTRA if max_bytes >= _LARGE else 0
        self._retention = Retention(self._chunks, self._evict, policy=policy, admission=admission, extra_bytes=extra)

    def make(self, nbytes: int, identity: ChunkIdentity | None = None) -> None:
        """Free `nbytes` bytes, for the chunk `identity` where one is about to be written.

        Errors: `StoreError` with STORE_FULL when too little may leave, NOT_ADMITTED when the filter declines.
        """
        newcomer = None if identity is None else Contender(identity.digest)
        self._in_use.settle()
        with self._lock:
            receipt = self._retention.make_room(nbytes, newcomer, b"" if identity is None else identity.parent)
            self.latest = receipt
        if receipt.full is not None:
            raise StoreError(Reason.STORE_FULL, receipt.full.cause, receipt.full.next_step)
        if receipt.outcome is RoomOutcome.DECLINED:
            raise StoreError(
                Reason.NOT_ADMITTED,
                f"the chunk was asked for no more often than what would leave for its {nbytes} bytes",
                "nothing: it is computed again when it is needed; a session that is saved is never declined",
            )

    def _chunks(self) -> list[_Stored]:
        return [
            _Stored(
                each.chunk,
                each.parent,
                each.file_bytes,
                each.created,
                each.last_used,
                max(1, each.uses),
                Hold.PINNED if pinned else Hold.FREE,
            )
            for each, pinned in self._catalog.published()
        ]

    def _evict(self, chunk: bytes) -> EvictOutcome:
        result = evict(self._catalog, [chunk])
        if result.removed:
            return EvictOutcome.EVICTED
        pinned = any(refusal.reason is Reason.CHUNK_PINNED for refusal in result.refused)
        return EvictOutcome.HELD if pinned else EvictOutcome.GONE
