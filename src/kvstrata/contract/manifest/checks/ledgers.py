"""Bytes and digests that must add up."""

from __future__ import annotations

from kvstrata.contract.manifest.checks.refusal import refuse, require_equal
from kvstrata.contract.manifest.evidence import GatherEvidence, LookupEvidence, PartialEvidence
from kvstrata.errors import Reason

__all__ = ["gather_bytes", "payload_bytes", "replica_payload"]


def payload_bytes(evidence: LookupEvidence) -> None:
    """The manifest counts K and V of all layers, heads and positions."""
    found, wanted = evidence.manifest.tensor.payload_bytes, evidence.tensor.full_bytes
    require_equal(Reason.PAYLOAD_BYTES_MISMATCH, "tensor.payload_bytes", found, wanted, "count K and V of every layer")


def replica_payload(evidence: GatherEvidence) -> None:
    """Each copy carries the payload that the manifest knows, and all copies of a chunk carry the same one."""
    for row in evidence.rows:
        if row.replica is None or row.chunk is None or row.known is None:
            continue
        digests = {copy.payload for copy in row.chunk.replicas if copy.published and copy.payload}
        if len(digests) > 1 or row.replica.payload != row.known.payload:
            raise refuse(
                Reason.REPLICA_PAYLOAD_DIGEST_MISMATCH,
                f"replica[{row.tier}].payload",
                f"the copies of rows [{row.chunk.start}, {row.chunk.stop}) do not agree on one payload digest",
                "verify the copies against each other and revoke the one that is wrong, or recompute the rows",
            )


def gather_bytes(evidence: PartialEvidence) -> None:
    """The gathered bytes are K and V of every row."""
    element = evidence.tensor.key_itemsize + evidence.tensor.value_itemsize
    wanted = len(evidence.gather.positions) * evidence.tensor.head_dim * element
    require_equal(Reason.PAYLOAD_BYTES_MISMATCH, "gather.bytes", evidence.gather.bytes, wanted, "gather the rows again")
