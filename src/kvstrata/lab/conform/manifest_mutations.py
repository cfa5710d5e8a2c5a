"""Wrong inputs of the manifest topic: one field of a live object is changed, and the next public call must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvstrata.contract.identity import Namespace
from kvstrata.lab.conform.manifest_scene import Scene

__all__ = ["MUTATIONS", "Mutation"]

_OTHER = "0" * 64


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change. field: as in the topic's data. call: the public call that must refuse: lookup, gather or partial."""

    field: str
    call: str
    change: Callable[[Scene], None]

    def provoke(self, scene: Scene) -> object:
        """Make the change in a scene that has looked up its candidates, and the call. Errors: those of the call."""
        if self.call == "partial":
            scene.finish_gather()
        self.change(scene)
        match self.call:
            case "lookup":
                return scene.look_up()
            case "gather":
                return scene.gather_rows()
            case _:
                return scene.admit()


def _source(**changes: Any) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        scene.manifest = replace(scene.manifest, source=replace(scene.manifest.source, **changes))

    return change


def _tensor(**changes: Any) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        scene.manifest = replace(scene.manifest, tensor=replace(scene.manifest.tensor, **changes))

    return change


def _part(name: str, **changes: Any) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        setattr(scene, name, replace(getattr(scene, name), **changes))

    return change


def _replica(tier: str, name: str, value: Callable[[Any], Any]) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        copy = getattr(scene.record, tier)
        setattr(copy, name, value(getattr(copy, name)))

    return change


def _authority(scene: Scene) -> None:
    scene.record.authority = scene.manifest.selector.selector_id


def _snapshot(line: str, **changes: Any) -> Callable[[Scene], None]:
    """Change the live snapshot; a manifest that is issued afterwards tells the same."""

    def change(scene: Scene) -> None:
        snapshot = getattr(scene.retrieval.publications, line).published
        snapshot.publication = replace(snapshot.record, **changes)
        scene.manifest = replace(scene.retrieval.manifest(), generation=scene.manifest.generation)

    return change


MUTATIONS = (
    Mutation("source.model_artefact", "lookup", _source(model_artefact=_OTHER)),
    Mutation("source.adapter_set", "lookup", _source(adapter_set=_OTHER)),
    Mutation("source.rope_config", "lookup", _source(rope_config=_OTHER)),
    Mutation("replica[device].tenant", "gather", _replica("device", "tenant", lambda _: Namespace("another"))),
    Mutation(
        "operation.request_generation",
        "lookup",
        lambda scene: _part("operation", request_generation=scene.operation.request_generation - 1)(scene),
    ),
    Mutation("lookup.source_cache_generation", "gather", _part("lookup", source_cache_generation=22)),
    Mutation("source.publication_generation", "lookup", _source(publication_generation=10)),
    Mutation("tensor.query_to_kv", "lookup", _tensor(query_to_kv=(0, 1, 0, 1))),
    Mutation("tensor.payload_bytes", "lookup", _tensor(payload_bytes=256)),
    Mutation("replica[host].payload", "gather", _replica("host", "payload", lambda _: bytes(32))),
    Mutation("replica[device].codec", "gather", _replica("device", "codec", lambda _: "fp8")),
    Mutation("directory.authority", "gather", _authority),
    Mutation("replica[host].epoch", "gather", _replica("host", "epoch", lambda epoch: epoch - 1)),
    Mutation("selector.source", "lookup", _snapshot("selectors", source=_OTHER)),
    Mutation("index.frontier", "lookup", _snapshot("indexes", frontier=7)),
    Mutation("lookup.index_generation", "gather", _part("lookup", index_generation=5)),
    Mutation("lookup.candidates", "gather", _part("lookup", candidates=(0, 3, 8))),
    Mutation("lookup.semantics", "gather", _part("lookup", semantics="full_kv_rows")),
    Mutation(
        "gather.destination_allocation_generation", "partial", _part("gather", destination_allocation_generation=84)
    ),
    Mutation("operation.fallback", "lookup", _part("operation", fallback="use_arrived_rows")),
)
"""In the order of the topic's data."""
