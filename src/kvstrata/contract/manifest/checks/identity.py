"""Whose rows, of which model, under which rules: the source, the snapshots, the replicas, the query."""

from __future__ import annotations

from kvstrata.contract.manifest.checks.refusal import require_equal, require_tenant
from kvstrata.contract.manifest.evidence import (
    GatherEvidence,
    IndexEvidence,
    LookupEvidence,
    PartialEvidence,
    ReceiptEvidence,
    SelectorEvidence,
)
from kvstrata.errors import Reason

__all__ = [
    "adapters",
    "cache_abi",
    "gather_query",
    "index_source",
    "index_tenant",
    "lineage",
    "lookup_query",
    "model",
    "partial_mask",
    "partial_query",
    "position_contract",
    "replica_tenant",
    "rope_config",
    "selector_source",
    "source_tenant",
    "visibility_policy",
]

_LOAD = "use the index of the model that is loaded, or load the model that the manifest was made under"
_AGAIN = "look the query up again; a receipt serves the query that it was made for and no other"


def model(evidence: LookupEvidence) -> None:
    """The weights."""
    found, wanted = evidence.manifest.source.model_artefact, evidence.source.model_artefact
    require_equal(Reason.MODEL_MISMATCH, "source.model_artefact", found, wanted, _LOAD)


def adapters(evidence: LookupEvidence) -> None:
    """The adapters in force."""
    found, wanted = evidence.manifest.source.adapter_set, evidence.source.adapter_set
    require_equal(Reason.ADAPTER_MISMATCH, "source.adapter_set", found, wanted, _LOAD)


def cache_abi(evidence: LookupEvidence) -> None:
    """Geometry, dtype and representation of the logical rows."""
    found, wanted = evidence.manifest.source.cache_abi, evidence.source.cache_abi
    require_equal(Reason.CACHE_ABI_MISMATCH, "source.cache_abi", found, wanted, _LOAD)


def visibility_policy(evidence: LookupEvidence) -> None:
    """Which rows a row may see."""
    found, wanted = evidence.manifest.source.visibility_policy, evidence.source.visibility_policy
    require_equal(Reason.VISIBILITY_POLICY_MISMATCH, "source.visibility_policy", found, wanted)


def position_contract(evidence: LookupEvidence) -> None:
    """What positions count, and whether keys carry them already."""
    found, wanted = evidence.manifest.source.position_contract, evidence.source.position_contract
    require_equal(Reason.POSITION_CONTRACT_MISMATCH, "source.position_contract", found, wanted, _LOAD)


def rope_config(evidence: LookupEvidence) -> None:
    """How keys were rotated."""
    found, wanted = evidence.manifest.source.rope_config, evidence.source.rope_config
    require_equal(Reason.ROPE_CONFIG_MISMATCH, "source.rope_config", found, wanted, _LOAD)


def lineage(evidence: LookupEvidence) -> None:
    """Whether the rows were computed under exact attention."""
    found, wanted = evidence.manifest.source.lineage, evidence.source.lineage
    require_equal(Reason.LINEAGE_MISMATCH, "source.lineage", found, wanted)


def source_tenant(evidence: LookupEvidence) -> None:
    """Whose rows the manifest is about."""
    require_tenant("source.tenant", evidence.manifest.source.tenant, evidence.source.tenant)


def index_tenant(evidence: IndexEvidence) -> None:
    """Whose rows the index holds."""
    require_tenant("index.tenant", evidence.index.tenant, evidence.source.tenant)


def replica_tenant(evidence: GatherEvidence) -> None:
    """Whose rows each copy holds."""
    for row in evidence.rows:
        if row.replica is not None:
            require_tenant(f"replica[{row.tier}].tenant", row.replica.tenant, evidence.source.tenant)


def selector_source(evidence: SelectorEvidence) -> None:
    """Which rows the proxy was derived from: those that the history had at the proxy's own frontier."""
    wanted = evidence.digests.get(evidence.selector.stop, "no source with that frontier")
    require_equal(
        Reason.SELECTOR_SOURCE_BINDING_MISMATCH,
        "selector.source",
        evidence.selector.source,
        wanted,
        "derive the proxy again from the rows that are committed now",
    )


def index_source(evidence: IndexEvidence) -> None:
    """Which rows the index finds: those of its proxy."""
    require_equal(
        Reason.INDEX_SOURCE_BINDING_MISMATCH,
        "index.source",
        evidence.index.source,
        evidence.selector.source,
        "build the index again over the proxy that is published",
    )


def lookup_query(evidence: ReceiptEvidence) -> None:
    """Whose candidates the look-up found."""
    require_equal(Reason.QUERY_MISMATCH, "lookup.query", evidence.lookup.query, evidence.operation.query, _AGAIN)


def gather_query(evidence: PartialEvidence) -> None:
    """For whom the rows were gathered."""
    require_equal(Reason.QUERY_MISMATCH, "gather.query", evidence.gather.query, evidence.operation.query, _AGAIN)


def partial_query(evidence: PartialEvidence) -> None:
    """Whose attention state it is."""
    require_equal(Reason.QUERY_MISMATCH, "partial.query", evidence.partial.query, evidence.operation.query, _AGAIN)


def partial_mask(evidence: PartialEvidence) -> None:
    """Under which mask the state was computed."""
    require_equal(Reason.MASK_MISMATCH, "partial.mask", evidence.partial.mask, evidence.operation.mask, _AGAIN)
