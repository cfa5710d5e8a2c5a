"""What rows a proxy or an index was derived from: upstream identity, generations, and the committed range."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstrata.contract.encoding import digest
from kvstrata.contract.identity import ChunkContext, Namespace
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.manifest.tensor import TensorContract
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["CAUSAL", "COORDINATES", "SourceBinding", "layout_digest", "source_digest"]

CAUSAL = "causal"
"""Visibility policy: a row sees itself and all rows before it."""

COORDINATES = "original_position"
"""Coordinate namespace of every position in manifests and receipts: counted from the start of the sequence."""


@dataclass(frozen=True, slots=True)
class SourceBinding:
    """The committed rows [start, frontier) of one history, and everything that decides what they mean.

    cache_abi, cache_layout, visibility_policy, model_artefact, adapter_set, position_contract, rope_config: hexadecimal
    digests. lineage: `exact`, or what made the rows approximate. tenant: who may use them.

    Generations, none of which stands for another: checkpoint_generation of the weights; namespace_generation of the
    tenant's namespace; request_generation against late work of a request that was cancelled; cache_generation of the
    logical history; publication_generation of the committed snapshot within it.
    """

    cache_abi: str
    cache_layout: str
    visibility_policy: str
    model_artefact: str
    checkpoint_generation: int
    adapter_set: str
    position_contract: str
    rope_config: str
    lineage: str
    tenant: Namespace
    namespace_generation: int
    request_generation: int
    cache_generation: int
    publication_generation: int
    start: int
    frontier: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.frontier:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"SourceBinding covers [{self.start}, {self.frontier}), which is no range of positions",
            )

    @classmethod
    def of(
        cls,
        context: ChunkContext,
        layout: SegmentLayout,
        *,
        namespace_generation: int,
        request_generation: int,
        cache_generation: int,
        publication_generation: int,
        start: int,
        frontier: int,
        visibility_policy: str = CAUSAL,
    ) -> SourceBinding:
        """The binding of rows [start, frontier) of a history under `context`, kept as `layout`."""
        return cls(
            cache_abi=_hex("cache-abi/1", context.abi),
            cache_layout=layout_digest(layout),
            visibility_policy=_hex("visibility-policy/1", visibility_policy),
            model_artefact=_hex("model-artefact/1", context.model.artefact),
            checkpoint_generation=context.model.weights_generation,
            adapter_set=_hex("adapter-set/1", context.model.adapters),
            position_contract=_hex("position-contract/1", (COORDINATES, context.abi.representation)),
            rope_config=_hex("rope-config/1", context.position),
            lineage=context.lineage,
            tenant=context.namespace,
            namespace_generation=namespace_generation,
            request_generation=request_generation,
            cache_generation=cache_generation,
            publication_generation=publication_generation,
            start=start,
            frontier=frontier,
        )


def source_digest(binding: SourceBinding, tensor: TensorContract) -> str:
    """What everything derived from the rows keeps: one hexadecimal digest over binding and tensor contract.

    The request is not part of it: another request may search the same rows with what was derived from them.
    """
    return _hex("retrieval-source/1", (replace(binding, request_generation=0), tensor))


def layout_digest(layout: SegmentLayout) -> str:
    """Hexadecimal digest of how segments lie."""
    return _hex("segment-layout/1", layout)


def _hex(domain: str, value: object) -> str:
    return digest(domain, value).hex()
