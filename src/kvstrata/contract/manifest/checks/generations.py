"""Counters that must be the current ones. None stands for another: a current index does not repair stale rows."""

from __future__ import annotations

from kvstrata.contract.manifest.checks.refusal import refuse, require_equal
from kvstrata.contract.manifest.evidence import (
    GatherEvidence,
    IndexEvidence,
    LookupEvidence,
    PartialEvidence,
    ReceiptEvidence,
)
from kvstrata.errors import Reason

__all__ = [
    "authority_epoch",
    "destination_allocation",
    "frontier",
    "index_cache",
    "index_selector",
    "lookup_cache",
    "lookup_frontier",
    "lookup_index",
    "lookup_selector",
    "manifest_index",
    "manifest_selector",
    "operation_cache",
    "operation_manifest",
    "operation_request",
    "replica_generation",
    "source_cache",
    "source_checkpoint",
    "source_namespace",
    "source_publication",
    "source_request",
    "visibility_event",
]

_CANCELLED = "drop the result: the request it belongs to was cancelled or its number was given to another"
_REBUILD = "derive the snapshot again from the rows that are committed now"


def source_checkpoint(evidence: LookupEvidence) -> None:
    """In-place changes of the weights."""
    found, wanted = evidence.manifest.source.checkpoint_generation, evidence.source.checkpoint_generation
    require_equal(Reason.STALE_CHECKPOINT_GENERATION, "source.checkpoint_generation", found, wanted, _REBUILD)


def source_namespace(evidence: LookupEvidence) -> None:
    """The tenant's namespace."""
    found, wanted = evidence.manifest.source.namespace_generation, evidence.source.namespace_generation
    require_equal(Reason.STALE_NAMESPACE_GENERATION, "source.namespace_generation", found, wanted)


def source_request(evidence: LookupEvidence) -> None:
    """The request that the manifest was issued to."""
    found, wanted = evidence.manifest.source.request_generation, evidence.source.request_generation
    require_equal(Reason.STALE_REQUEST_GENERATION, "source.request_generation", found, wanted, _CANCELLED)


def source_cache(evidence: LookupEvidence) -> None:
    """The logical history that the manifest is about."""
    found, wanted = evidence.manifest.source.cache_generation, evidence.source.cache_generation
    require_equal(Reason.STALE_CACHE_GENERATION, "source.cache_generation", found, wanted)


def source_publication(evidence: LookupEvidence) -> None:
    """The committed snapshot within that history."""
    found, wanted = evidence.manifest.source.publication_generation, evidence.source.publication_generation
    require_equal(Reason.STALE_PUBLICATION_GENERATION, "source.publication_generation", found, wanted)


def frontier(evidence: LookupEvidence) -> None:
    """The range of rows that the manifest is about."""
    found = (evidence.manifest.source.start, evidence.manifest.source.frontier)
    wanted = (evidence.source.start, evidence.source.frontier)
    require_equal(Reason.STALE_FRONTIER, "source.frontier", found, wanted)


def manifest_selector(evidence: LookupEvidence) -> None:
    """The proxy that the manifest names."""
    found = (evidence.manifest.selector.selector_id, evidence.manifest.selector.generation)
    wanted = (evidence.selector.selector_id, evidence.selector.generation)
    require_equal(Reason.STALE_SELECTOR_GENERATION, "selector.generation", found, wanted)


def manifest_index(evidence: LookupEvidence) -> None:
    """The index that the manifest names."""
    found = (evidence.manifest.index.index_id, evidence.manifest.index.generation)
    wanted = (evidence.index.index_id, evidence.index.generation)
    require_equal(Reason.STALE_INDEX_GENERATION, "index.generation", found, wanted)


def index_selector(evidence: IndexEvidence) -> None:
    """The proxy that the index was built over."""
    found = (evidence.index.selector_id, evidence.index.selector_generation)
    wanted = (evidence.selector.selector_id, evidence.selector.generation)
    require_equal(Reason.STALE_SELECTOR_GENERATION, "index.selector_generation", found, wanted, _REBUILD)


def index_cache(evidence: IndexEvidence) -> None:
    """The history that the index finds rows of."""
    found, wanted = evidence.index.cache_generation, evidence.source.cache_generation
    require_equal(Reason.STALE_CACHE_GENERATION, "index.cache_generation", found, wanted, _REBUILD)


def operation_request(evidence: LookupEvidence) -> None:
    """The request that asks."""
    found, wanted = evidence.operation.request_generation, evidence.source.request_generation
    require_equal(Reason.STALE_REQUEST_GENERATION, "operation.request_generation", found, wanted, _CANCELLED)


def operation_cache(evidence: LookupEvidence) -> None:
    """The history that is asked about."""
    found, wanted = evidence.operation.cache_generation, evidence.source.cache_generation
    require_equal(Reason.STALE_CACHE_GENERATION, "operation.cache_generation", found, wanted)


def operation_manifest(evidence: LookupEvidence) -> None:
    """The manifest that the operation was planned with."""
    found, wanted = evidence.operation.manifest_generation, evidence.manifest.generation
    require_equal(Reason.STALE_MANIFEST_GENERATION, "operation.manifest_generation", found, wanted)


def lookup_cache(evidence: ReceiptEvidence) -> None:
    """The history that was searched."""
    found, wanted = evidence.lookup.source_cache_generation, evidence.source.cache_generation
    require_equal(Reason.STALE_CACHE_GENERATION, "lookup.source_cache_generation", found, wanted)


def lookup_frontier(evidence: ReceiptEvidence) -> None:
    """How much of it was committed then."""
    found, wanted = evidence.lookup.source_frontier, evidence.source.frontier
    require_equal(Reason.STALE_FRONTIER, "lookup.source_frontier", found, wanted)


def lookup_index(evidence: ReceiptEvidence) -> None:
    """The index that was searched: identifiers of one generation mean nothing in another."""
    found, wanted = evidence.lookup.index_generation, evidence.index.generation
    require_equal(Reason.STALE_INDEX_GENERATION, "lookup.index_generation", found, wanted)


def lookup_selector(evidence: ReceiptEvidence) -> None:
    """The proxy that was searched."""
    found, wanted = evidence.lookup.selector_generation, evidence.selector.generation
    require_equal(Reason.STALE_SELECTOR_GENERATION, "lookup.selector_generation", found, wanted)


def replica_generation(evidence: GatherEvidence) -> None:
    """Each copy is the one that the manifest knows, not one that took its place."""
    for row in evidence.rows:
        if row.replica is not None and row.known is not None:
            field = f"replica[{row.tier}].generation"
            require_equal(Reason.STALE_REPLICA_GENERATION, field, row.known.generation, row.replica.generation)


def authority_epoch(evidence: GatherEvidence) -> None:
    """Each copy was validated under the authority that is in force."""
    for row in evidence.rows:
        if row.replica is not None and row.chunk is not None and row.replica.epoch != row.chunk.epoch:
            raise refuse(
                Reason.STALE_AUTHORITY_EPOCH,
                f"replica[{row.tier}].epoch",
                f"{row.replica.epoch}, while the authority of the chunk is in epoch {row.chunk.epoch}",
                "read another copy; this one is fenced off until it is validated anew",
            )


def destination_allocation(evidence: PartialEvidence) -> None:
    """The slot still holds the rows that were gathered into it."""
    found, wanted = evidence.gather.destination_allocation_generation, evidence.allocation
    field = "gather.destination_allocation_generation"
    require_equal(Reason.STALE_DESTINATION_ALLOCATION, field, found, wanted, "gather the rows again")


def visibility_event(evidence: PartialEvidence) -> None:
    """The event that made those rows visible is the slot's last one."""
    found, wanted = evidence.gather.visibility_event_generation, evidence.event
    field = "gather.visibility_event_generation"
    require_equal(Reason.STALE_VISIBILITY_EVENT, field, found, wanted, "gather the rows again")
