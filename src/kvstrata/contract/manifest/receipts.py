"""What a look-up, a gather and a partial attention did. Identifiers are not rows, and rows are not attention."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["DeletionReceipt", "GatherReceipt", "LookupReceipt", "LookupSemantics", "PartialReceipt"]


class LookupSemantics(StrEnum):
    """What a look-up hands out."""

    CANDIDATE_IDS_ONLY = "candidate_ids_only"


@dataclass(frozen=True, slots=True)
class LookupReceipt:
    """Candidates of one look-up.

    number: of the look-up, until it is finished. candidates: original positions, best first; scores: theirs, or empty.
    withdrawn: results left out because their rows are on their way out.
    """

    number: int
    query: str
    layer: int
    query_head: int
    kv_head: int
    index_generation: int
    selector_generation: int
    source_cache_generation: int
    source_frontier: int
    candidates: tuple[int, ...]
    scores: tuple[float, ...] = ()
    withdrawn: int = 0
    semantics: LookupSemantics = LookupSemantics.CANDIDATE_IDS_ONLY


@dataclass(frozen=True, slots=True)
class GatherReceipt:
    """Rows K and V [len(positions), head_dim] that were copied to `destination_slot` of the tier `destination_tier`.

    source_tiers, source_replica_generations: where each row came from. rows: hexadecimal digest of the bytes, K before
    V. bytes: of both.
    """

    query: str
    layer: int
    query_head: int
    kv_head: int
    positions: tuple[int, ...]
    source_tiers: tuple[str, ...]
    source_replica_generations: tuple[int, ...]
    destination_tier: str
    destination_slot: int
    destination_allocation_generation: int
    visibility_event_generation: int
    head_dim: int
    dtype: str
    bytes: int
    rows: str

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the gathered K, and of V."""
        return (len(self.positions), self.head_dim)


@dataclass(frozen=True, slots=True)
class PartialReceipt:
    """An online-softmax state of one query over one support. Of no use to any other query.

    query, mask, state: hexadecimal digests; `state` covers m, l and the value sum. support: original positions.
    merge: identity and revision of the merge that may take it.
    """

    query: str
    mask: str
    layer: int
    query_head: int
    kv_head: int
    support: tuple[int, ...]
    state: str
    dtype: str
    merge: str


@dataclass(frozen=True, slots=True)
class DeletionReceipt:
    """Something was deleted. what: its name. durable: no crash brings it back."""

    what: str
    tier: str
    durable: bool
