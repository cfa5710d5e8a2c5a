"""What a record claims to be."""

from __future__ import annotations

from kvstrata.contract.manifest.checks.refusal import refuse, require_equal
from kvstrata.contract.manifest.evidence import LookupEvidence, PartialEvidence, ReceiptEvidence
from kvstrata.contract.manifest.operation import Fallback
from kvstrata.contract.manifest.receipts import LookupSemantics
from kvstrata.errors import Reason

__all__ = ["candidate_semantics", "fallback", "state_dtype"]

_STATE_DTYPE = "float32"


def fallback(evidence: LookupEvidence) -> None:
    """What happens when the operation is late is one of the declared ways."""
    if not isinstance(evidence.operation.fallback, Fallback):
        raise refuse(
            Reason.UNDECLARED_FALLBACK,
            "operation.fallback",
            f"{evidence.operation.fallback!r} is none of {', '.join(Fallback)}",
            "declare what a late look-up turns into; going on with the rows that arrived is an approximation",
        )


def candidate_semantics(evidence: ReceiptEvidence) -> None:
    """A look-up hands out identifiers; only a gather hands out rows."""
    if evidence.lookup.semantics is not LookupSemantics.CANDIDATE_IDS_ONLY:
        raise refuse(
            Reason.CANDIDATE_IDS_NOT_ROWS,
            "lookup.semantics",
            f"{evidence.lookup.semantics!r} was claimed, a look-up yields {LookupSemantics.CANDIDATE_IDS_ONLY}",
            "gather the rows of the candidates",
        )


def state_dtype(evidence: PartialEvidence) -> None:
    """Partial states are kept and merged in fp32, whatever the rows are kept in."""
    found = evidence.partial.dtype
    require_equal(Reason.STATE_DTYPE_MISMATCH, "partial.dtype", found, _STATE_DTYPE, "keep m, l and the sum in fp32")
