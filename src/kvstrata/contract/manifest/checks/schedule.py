"""Times that can be compared. That a deadline has passed is an outcome, not an error: see `FallbackDecision`."""

from __future__ import annotations

from kvstrata.contract.manifest.checks.refusal import require_equal
from kvstrata.contract.manifest.evidence import LookupEvidence
from kvstrata.errors import Reason

__all__ = ["clock_origin"]


def clock_origin(evidence: LookupEvidence) -> None:
    """The deadline counts from the origin of the store's own clock."""
    found, wanted = evidence.operation.clock_origin, evidence.clock_origin
    field = "operation.clock_origin"
    require_equal(Reason.CLOCK_ORIGIN_MISMATCH, field, found, wanted, "give the deadline by the store's clock")
