"""Shapes, head ownership, layouts: same shape is needed for a read, and proves nothing."""

from __future__ import annotations

from kvstrata.contract.manifest.checks.refusal import refuse, require_equal
from kvstrata.contract.manifest.evidence import (
    GatherEvidence,
    IndexEvidence,
    LookupEvidence,
    PartialEvidence,
    ReceiptEvidence,
)
from kvstrata.contract.manifest.source import COORDINATES
from kvstrata.errors import Reason

__all__ = [
    "codec_layout",
    "coordinates",
    "gather_heads",
    "gather_layer",
    "gather_shape",
    "head_map",
    "lookup_heads",
    "lookup_layer",
    "operation_heads",
    "operation_layer",
    "partial_heads",
    "partial_layer",
    "source_layout",
    "tensor_shape",
]

_HEADS = "name the query head and the K/V head that owns its rows; they are numbered apart"


def tensor_shape(evidence: LookupEvidence) -> None:
    """Shape and element sizes of K and V."""
    presented, live = evidence.manifest.tensor, evidence.tensor
    found = (*presented.shape, presented.query_heads, presented.key_itemsize, presented.value_itemsize)
    wanted = (*live.shape, live.query_heads, live.key_itemsize, live.value_itemsize)
    require_equal(Reason.GEOMETRY_MISMATCH, "tensor.shape", found, wanted)


def head_map(evidence: LookupEvidence) -> None:
    """Which K/V head each query head reads."""
    found, wanted = evidence.manifest.tensor.query_to_kv, evidence.tensor.query_to_kv
    require_equal(Reason.GQA_OWNERSHIP_MISMATCH, "tensor.query_to_kv", found, wanted, _HEADS)


def source_layout(evidence: LookupEvidence) -> None:
    """How segments lie."""
    found, wanted = evidence.manifest.source.cache_layout, evidence.source.cache_layout
    require_equal(Reason.CODEC_LAYOUT_MISMATCH, "source.cache_layout", found, wanted)


def coordinates(evidence: IndexEvidence) -> None:
    """What entries of the index count."""
    found = evidence.index.coordinates
    require_equal(Reason.COORDINATES_MISMATCH, "index.coordinates", found, COORDINATES, "index original positions")


def operation_layer(evidence: LookupEvidence) -> None:
    """The layer exists."""
    layer, layers = evidence.operation.layer, evidence.tensor.layers
    if not 0 <= layer < layers:
        raise refuse(Reason.LAYER_MISMATCH, "operation.layer", f"{layer} is none of {layers} layers", "name one")


def operation_heads(evidence: LookupEvidence) -> None:
    """The K/V head owns the query head's rows."""
    head, owners = evidence.operation.query_head, evidence.tensor.query_to_kv
    owner = owners[head] if 0 <= head < len(owners) else "no head"
    field = f"operation.kv_head of query head {head}"
    require_equal(Reason.GQA_OWNERSHIP_MISMATCH, field, evidence.operation.kv_head, owner, _HEADS)


def lookup_layer(evidence: ReceiptEvidence) -> None:
    """The layer that was searched."""
    require_equal(Reason.LAYER_MISMATCH, "lookup.layer", evidence.lookup.layer, evidence.operation.layer)


def lookup_heads(evidence: ReceiptEvidence) -> None:
    """The heads that were searched for."""
    found = (evidence.lookup.query_head, evidence.lookup.kv_head)
    wanted = (evidence.operation.query_head, evidence.operation.kv_head)
    require_equal(Reason.GQA_OWNERSHIP_MISMATCH, "lookup.query_head, kv_head", found, wanted, _HEADS)


def codec_layout(evidence: GatherEvidence) -> None:
    """Each copy is kept as the manifest says, in a representation that its tier keeps and that rows are copied from."""
    for row in evidence.rows:
        replica, known = row.replica, row.known
        if replica is None or known is None:
            continue
        field = f"replica[{row.tier}].codec, layout"
        require_equal(Reason.CODEC_LAYOUT_MISMATCH, field, (replica.codec, replica.layout), (known.codec, known.layout))
        capability = evidence.tiers.get(row.tier)
        if capability is not None and not capability.keeps(
            codec=replica.codec, layout=replica.layout, tenant=replica.tenant.tenant
        ):
            raise refuse(
                Reason.CODEC_LAYOUT_MISMATCH,
                field,
                f"codec {replica.codec!r} is none that tier {row.tier!r} keeps",
                "read another copy, or decode this one first",
            )


def gather_layer(evidence: PartialEvidence) -> None:
    """The layer whose rows were gathered."""
    require_equal(Reason.LAYER_MISMATCH, "gather.layer", evidence.gather.layer, evidence.operation.layer)


def gather_heads(evidence: PartialEvidence) -> None:
    """The heads whose rows were gathered."""
    found = (evidence.gather.query_head, evidence.gather.kv_head)
    wanted = (evidence.operation.query_head, evidence.operation.kv_head)
    require_equal(Reason.GQA_OWNERSHIP_MISMATCH, "gather.query_head, kv_head", found, wanted, _HEADS)


def gather_shape(evidence: PartialEvidence) -> None:
    """Elements of a gathered row."""
    require_equal(Reason.GEOMETRY_MISMATCH, "gather.head_dim", evidence.gather.head_dim, evidence.tensor.head_dim)


def partial_layer(evidence: PartialEvidence) -> None:
    """The layer of the state."""
    require_equal(Reason.LAYER_MISMATCH, "partial.layer", evidence.partial.layer, evidence.operation.layer)


def partial_heads(evidence: PartialEvidence) -> None:
    """The heads of the state."""
    found = (evidence.partial.query_head, evidence.partial.kv_head)
    wanted = (evidence.operation.query_head, evidence.operation.kv_head)
    require_equal(Reason.GQA_OWNERSHIP_MISMATCH, "partial.query_head, kv_head", found, wanted, _HEADS)
