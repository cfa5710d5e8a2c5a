"""One wrong field for every check of the retrieval protocol, and how the call is made that must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvstrata.contract.identity import Namespace
from kvstrata.contract.states import FileReplicaState, SnapshotState
from kvstrata.errors import Reason
from kvstrata.lab.conform.manifest_scene import Scene
from kvstrata.lab.conform.result import load_topic

OTHER = "f" * 64
ANOTHER = Namespace("another")
Change = Callable[[Scene], None]


def make_scene(**changes: Any) -> Scene:
    """The fixture up to its look-up."""
    return Scene(load_topic("manifest")["fixture"], **changes)


def part(name: str, **changes: Any) -> Change:
    """Change fields of a record that the scene shows."""

    def change(scene: Scene) -> None:
        setattr(scene, name, replace(getattr(scene, name), **changes))

    return change


def manifest(name: str, **changes: Any) -> Change:
    """Change fields of a part of the manifest."""

    def change(scene: Scene) -> None:
        scene.manifest = replace(scene.manifest, **{name: replace(getattr(scene.manifest, name), **changes)})

    return change


def snapshot(line: str, **changes: Any) -> Change:
    """Change the live, published snapshot; the manifest that the scene shows tells the same."""

    def change(scene: Scene) -> None:
        found = getattr(scene.retrieval.publications, line).published
        found.publication = replace(found.record, **changes)
        scene.manifest = replace(scene.retrieval.manifest(), generation=scene.manifest.generation)

    return change


def state(line: str, to: SnapshotState) -> Change:
    def change(scene: Scene) -> None:
        getattr(scene.retrieval.publications, line).published.state = to

    return change


def copy(tier: str, **changes: Any) -> Change:
    """Change the live replica."""

    def change(scene: Scene) -> None:
        for name, value in changes.items():
            setattr(getattr(scene.record, tier), name, value)

    return change


def no_way_out(scene: Scene) -> None:
    rows: Any = scene.retrieval.tiers["host"]
    rows.capability = replace(rows.capability, dma_source=False)


def demand_more(scene: Scene) -> None:
    scene.retrieval.directory.survivors = 3


def lose_authority(scene: Scene) -> None:
    scene.record.authority = "selector"


CHAIN: dict[str, tuple[Change, Reason]] = {
    "selector_source": (snapshot("selectors", source=OTHER), Reason.SELECTOR_SOURCE_BINDING_MISMATCH),
    "selector_coverage": (snapshot("selectors", start=-1), Reason.COVERAGE_BEYOND_FRONTIER),
    "index_tenant": (snapshot("indexes", tenant=ANOTHER), Reason.TENANT_MISMATCH),
    "index_source": (snapshot("indexes", source=OTHER), Reason.INDEX_SOURCE_BINDING_MISMATCH),
    "index_selector": (snapshot("indexes", selector_generation=3), Reason.STALE_SELECTOR_GENERATION),
    "index_cache": (snapshot("indexes", cache_generation=22), Reason.STALE_CACHE_GENERATION),
    "coordinates": (snapshot("indexes", coordinates="packed_row"), Reason.COORDINATES_MISMATCH),
    "index_frontier": (snapshot("indexes", frontier=7), Reason.INDEX_FRONTIER_GAP),
    "index_entries": (snapshot("indexes", entries=((0, 9),)), Reason.COVERAGE_BEYOND_FRONTIER),
    "selector_published": (state("selectors", SnapshotState.VALIDATED), Reason.SNAPSHOT_NOT_PUBLISHED),
}
OPERATION: dict[str, tuple[Change, Reason]] = CHAIN | {
    "model": (manifest("source", model_artefact=OTHER), Reason.MODEL_MISMATCH),
    "adapters": (manifest("source", adapter_set=OTHER), Reason.ADAPTER_MISMATCH),
    "cache_abi": (manifest("source", cache_abi=OTHER), Reason.CACHE_ABI_MISMATCH),
    "visibility_policy": (manifest("source", visibility_policy=OTHER), Reason.VISIBILITY_POLICY_MISMATCH),
    "position_contract": (manifest("source", position_contract=OTHER), Reason.POSITION_CONTRACT_MISMATCH),
    "rope_config": (manifest("source", rope_config=OTHER), Reason.ROPE_CONFIG_MISMATCH),
    "lineage": (manifest("source", lineage="quest/1"), Reason.LINEAGE_MISMATCH),
    "source_tenant": (manifest("source", tenant=ANOTHER), Reason.TENANT_MISMATCH),
    "source_checkpoint": (manifest("source", checkpoint_generation=9), Reason.STALE_CHECKPOINT_GENERATION),
    "source_namespace": (manifest("source", namespace_generation=0), Reason.STALE_NAMESPACE_GENERATION),
    "source_request": (manifest("source", request_generation=1), Reason.STALE_REQUEST_GENERATION),
    "source_cache": (manifest("source", cache_generation=22), Reason.STALE_CACHE_GENERATION),
    "source_publication": (manifest("source", publication_generation=10), Reason.STALE_PUBLICATION_GENERATION),
    "frontier": (manifest("source", frontier=7), Reason.STALE_FRONTIER),
    "manifest_selector": (manifest("selector", generation=3), Reason.STALE_SELECTOR_GENERATION),
    "manifest_index": (manifest("index", generation=5), Reason.STALE_INDEX_GENERATION),
    "operation_request": (part("operation", request_generation=1), Reason.STALE_REQUEST_GENERATION),
    "operation_cache": (part("operation", cache_generation=22), Reason.STALE_CACHE_GENERATION),
    "operation_manifest": (part("operation", manifest_generation=0), Reason.STALE_MANIFEST_GENERATION),
    "tensor_shape": (manifest("tensor", head_dim=8), Reason.GEOMETRY_MISMATCH),
    "head_map": (manifest("tensor", query_to_kv=(0, 1, 0, 1)), Reason.GQA_OWNERSHIP_MISMATCH),
    "source_layout": (manifest("source", cache_layout=OTHER), Reason.CODEC_LAYOUT_MISMATCH),
    "operation_layer": (part("operation", layer=2), Reason.LAYER_MISMATCH),
    "operation_heads": (part("operation", kv_head=0), Reason.GQA_OWNERSHIP_MISMATCH),
    "payload_bytes": (manifest("tensor", payload_bytes=256), Reason.PAYLOAD_BYTES_MISMATCH),
    "clock_origin": (part("operation", clock_origin="wall"), Reason.CLOCK_ORIGIN_MISMATCH),
    "fallback": (part("operation", fallback="use_arrived_rows"), Reason.UNDECLARED_FALLBACK),
}
LOOKUP = OPERATION | {"index_published": (state("indexes", SnapshotState.RETIRED), Reason.SNAPSHOT_NOT_PUBLISHED)}
RECEIPT: dict[str, tuple[Change, Reason]] = OPERATION | {
    "candidates_committed": (part("lookup", candidates=(0, 3, 8)), Reason.CANDIDATE_BEYOND_FRONTIER),
    "candidates_distinct": (part("lookup", candidates=(0, 3, 3)), Reason.DUPLICATE_CANDIDATE),
    "candidates_indexed": (snapshot("indexes", entries=((0, 3), (4, 8))), Reason.CANDIDATE_NOT_INDEXED),
    "lookup_query": (part("lookup", query=OTHER), Reason.QUERY_MISMATCH),
    "lookup_cache": (part("lookup", source_cache_generation=22), Reason.STALE_CACHE_GENERATION),
    "lookup_frontier": (part("lookup", source_frontier=7), Reason.STALE_FRONTIER),
    "lookup_index": (part("lookup", index_generation=5), Reason.STALE_INDEX_GENERATION),
    "lookup_selector": (part("lookup", selector_generation=3), Reason.STALE_SELECTOR_GENERATION),
    "lookup_layer": (part("lookup", layer=0), Reason.LAYER_MISMATCH),
    "lookup_heads": (part("lookup", query_head=3), Reason.GQA_OWNERSHIP_MISMATCH),
    "candidate_semantics": (part("lookup", semantics="full_kv_rows"), Reason.CANDIDATE_IDS_NOT_ROWS),
    "index_readable": (state("indexes", SnapshotState.VALIDATED), Reason.SNAPSHOT_NOT_PUBLISHED),
}
GATHER = RECEIPT | {
    "replica_tenant": (copy("device", tenant=ANOTHER), Reason.TENANT_MISMATCH),
    "replica_generation": (copy("device", generation=19), Reason.STALE_REPLICA_GENERATION),
    "authority_epoch": (copy("host", epoch=0), Reason.STALE_AUTHORITY_EPOCH),
    "codec_layout": (copy("device", codec="fp8"), Reason.CODEC_LAYOUT_MISMATCH),
    "replicas_present": (copy("device", state=FileReplicaState.REVOKED), Reason.REPLICA_MISSING),
    "authority_is_replica": (lose_authority, Reason.PROXY_NOT_RECOVERY_REPLICA),
    "survivors": (demand_more, Reason.TOO_FEW_REPLICAS),
    "paths": (no_way_out, Reason.NO_LEGAL_PATH),
    "replica_payload": (copy("host", payload=bytes(32)), Reason.REPLICA_PAYLOAD_DIGEST_MISMATCH),
}
PARTIAL = RECEIPT | {
    "gather_query": (part("gather", query=OTHER), Reason.QUERY_MISMATCH),
    "partial_query": (part("partial", query=OTHER), Reason.QUERY_MISMATCH),
    "partial_mask": (part("partial", mask=OTHER), Reason.MASK_MISMATCH),
    "destination_allocation": (
        part("gather", destination_allocation_generation=84),
        Reason.STALE_DESTINATION_ALLOCATION,
    ),
    "visibility_event": (part("gather", visibility_event_generation=30), Reason.STALE_VISIBILITY_EVENT),
    "gather_layer": (part("gather", layer=0), Reason.LAYER_MISMATCH),
    "gather_heads": (part("gather", kv_head=0), Reason.GQA_OWNERSHIP_MISMATCH),
    "gather_shape": (part("gather", head_dim=8), Reason.GEOMETRY_MISMATCH),
    "partial_layer": (part("partial", layer=0), Reason.LAYER_MISMATCH),
    "partial_heads": (part("partial", query_head=3), Reason.GQA_OWNERSHIP_MISMATCH),
    "gather_support": (part("gather", positions=(0, 7, 3)), Reason.SUPPORT_MISMATCH),
    "partial_support": (part("partial", support=(0, 3)), Reason.SUPPORT_MISMATCH),
    "gather_bytes": (part("gather", bytes=48), Reason.PAYLOAD_BYTES_MISMATCH),
    "state_dtype": (part("partial", dtype="float16"), Reason.STATE_DTYPE_MISMATCH),
}
CASES = {"LOOKUP": LOOKUP, "GATHER": GATHER, "PARTIAL": PARTIAL}


def prepared(table: str) -> Scene:
    """A scene in which the call of `table` is the next one, and would be answered."""
    scene = make_scene()
    if table == "PARTIAL":
        scene.finish_gather()
    return scene


def call(table: str, scene: Scene) -> object:
    """The public call that makes the checks of `table`."""
    return {"LOOKUP": scene.look_up, "GATHER": scene.gather_rows, "PARTIAL": scene.admit}[table]()
