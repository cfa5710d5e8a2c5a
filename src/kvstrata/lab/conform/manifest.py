"""Topic `manifest`: one query's way from stored rows to a partial state: generations, shapes, bytes, and refusals."""

from __future__ import annotations

from typing import Any

from kvstrata.contract.identity import CacheAbi
from kvstrata.contract.manifest import TensorContract
from kvstrata.errors import KvstrataError
from kvstrata.lab.conform.manifest_mutations import MUTATIONS
from kvstrata.lab.conform.manifest_scene import Scene
from kvstrata.lab.conform.result import Refusals, TopicReport, compare, load_topic

__all__ = ["conform_manifest"]

_LARGE = CacheAbi(layers=32, query_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
_LARGE_POSITIONS = 32768


def conform_manifest() -> TopicReport:
    """Run the trace and the wrong inputs through the store. Takes less than a second."""
    data = load_topic("manifest")
    refusals = _refusals(data)
    computed = {**_trace(data["fixture"]), "invalid_rejected": refusals.refused}
    return TopicReport("manifest", compare(data["figures"], computed), refusals)


def _trace(fixture: dict[str, Any]) -> dict[str, Any]:
    scene = Scene(fixture)
    scene.finish_gather()
    scene.admit()
    manifest, gather = scene.manifest, scene.gather
    row = scene.row(list(gather.positions).index(3))
    chunk = manifest.directory.chunks[0]
    copies = {copy.tier: copy.generation for copy in chunk.replicas}
    large = TensorContract.of(_LARGE, _LARGE_POSITIONS)
    halves = Scene(fixture, dtype="float16")
    slots = [halves.retrieval.directory.arena.backing.readable(g.slot) for g in halves.record.grants if g is not None]
    return {
        "full_payload": sum(slot.nbytes for slot in slots),
        "token_payload_real": large.token_bytes / 2**10,
        "request_payload_real": large.full_bytes / 2**30,
        "head2_owner": manifest.tensor.query_to_kv[2],
        "index_frontier": manifest.index.frontier,
        "K_sentinel": row[0],
        "V_sentinel": row[1],
        "generations": {
            "cache": manifest.source.cache_generation,
            "publication": manifest.source.publication_generation,
            "host": copies["host"],
            "device": copies["device"],
            "selector": manifest.selector.generation,
            "index": manifest.index.generation,
            "alloc": gather.destination_allocation_generation,
            "event": gather.visibility_event_generation,
            "source_replicas": list(gather.source_replica_generations),
        },
        "shapes": {
            "KV": list(manifest.tensor.shape),
            "proxy": list(manifest.selector.shape),
            "gather": list(gather.shape),
            "o": list(scene.state.output()[0].shape),
        },
        "valid_recovery_replicas": chunk.valid_replicas,
    }


def _refusals(data: dict[str, Any]) -> Refusals:
    mutations = {mutation.field: mutation for mutation in MUTATIONS}
    failed = []
    for item in data["refusals"]:
        try:
            mutations[item["field"]].provoke(Scene(data["fixture"]))
            found = "accepted"
        except KvstrataError as error:
            found = str(error.reason)
        if found != item["reason"]:
            failed.append({"field": item["field"], "expected": item["reason"], "found": found})
    expected = len(data["refusals"])
    return Refusals(expected, expected - len(failed), tuple(failed))
