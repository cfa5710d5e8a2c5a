"""Which checks each call makes, in which order: the first that fails gives the reason.

Identity, generations, geometry, members, ledgers, schedule, semantics, publication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvstrata.contract.manifest.checks import generations as generation
from kvstrata.contract.manifest.checks import geometry, identity, ledgers, members, publication, schedule, semantics
from kvstrata.contract.manifest.evidence import (
    GatherEvidence,
    IndexEvidence,
    LookupEvidence,
    PartialEvidence,
    ReceiptEvidence,
    SelectorEvidence,
)

__all__ = ["GATHER", "LOOKUP", "PARTIAL", "PUBLISH_INDEX", "PUBLISH_SELECTOR", "SEARCH_RESULT", "run_checks"]

Evidence = TypeVar("Evidence")
_GROUPS = (identity, generation, geometry, members, ledgers, schedule, semantics, publication)
_STAGE = {module.__name__: stage for stage, module in enumerate(_GROUPS)}


def run_checks(checks: Iterable[Callable[[Evidence], None]], evidence: Evidence) -> None:
    """Make the checks in order. Errors: `RetrievalError` of the first that fails."""
    for check in checks:
        check(evidence)


def _in_order(*checks: Callable[[Evidence], None]) -> tuple[Callable[[Evidence], None], ...]:
    return tuple(sorted(checks, key=lambda check: _STAGE[check.__module__]))


PUBLISH_SELECTOR: tuple[Callable[[SelectorEvidence], None], ...] = _in_order(
    identity.selector_source,
    members.selector_coverage,
)

PUBLISH_INDEX: tuple[Callable[[IndexEvidence], None], ...] = _in_order(
    *PUBLISH_SELECTOR,
    identity.index_tenant,
    identity.index_source,
    generation.index_selector,
    generation.index_cache,
    geometry.coordinates,
    members.index_frontier,
    members.index_entries,
    publication.selector_published,
)

_OPERATION: tuple[Callable[[LookupEvidence], None], ...] = _in_order(
    *PUBLISH_INDEX,
    identity.model,
    identity.adapters,
    identity.cache_abi,
    identity.visibility_policy,
    identity.position_contract,
    identity.rope_config,
    identity.lineage,
    identity.source_tenant,
    generation.source_checkpoint,
    generation.source_namespace,
    generation.source_request,
    generation.source_cache,
    generation.source_publication,
    generation.frontier,
    generation.manifest_selector,
    generation.manifest_index,
    generation.operation_request,
    generation.operation_cache,
    generation.operation_manifest,
    geometry.tensor_shape,
    geometry.head_map,
    geometry.source_layout,
    geometry.operation_layer,
    geometry.operation_heads,
    ledgers.payload_bytes,
    schedule.clock_origin,
    semantics.fallback,
)

LOOKUP: tuple[Callable[[LookupEvidence], None], ...] = _in_order(*_OPERATION, publication.index_published)

SEARCH_RESULT: tuple[Callable[[ReceiptEvidence], None], ...] = _in_order(
    members.candidates_committed,
    members.candidates_distinct,
    members.candidates_indexed,
)

_RECEIPT: tuple[Callable[[ReceiptEvidence], None], ...] = _in_order(
    *_OPERATION,
    *SEARCH_RESULT,
    identity.lookup_query,
    generation.lookup_cache,
    generation.lookup_frontier,
    generation.lookup_index,
    generation.lookup_selector,
    geometry.lookup_layer,
    geometry.lookup_heads,
    semantics.candidate_semantics,
    publication.index_readable,
)

GATHER: tuple[Callable[[GatherEvidence], None], ...] = _in_order(
    *_RECEIPT,
    identity.replica_tenant,
    generation.replica_generation,
    generation.authority_epoch,
    geometry.codec_layout,
    members.replicas_present,
    members.authority_is_replica,
    members.survivors,
    members.paths,
    ledgers.replica_payload,
)

PARTIAL: tuple[Callable[[PartialEvidence], None], ...] = _in_order(
    *_RECEIPT,
    identity.gather_query,
    identity.partial_query,
    identity.partial_mask,
    generation.destination_allocation,
    generation.visibility_event,
    geometry.gather_layer,
    geometry.gather_heads,
    geometry.gather_shape,
    geometry.partial_layer,
    geometry.partial_heads,
    members.gather_support,
    members.partial_support,
    ledgers.gather_bytes,
    semantics.state_dtype,
)
