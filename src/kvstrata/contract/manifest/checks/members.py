"""Which positions and which copies: inside the committed range, covered, distinct, and able to give rows back."""

from __future__ import annotations

from collections import Counter

from kvstrata.contract.capability import legal_path
from kvstrata.contract.manifest.checks.refusal import refuse, require_equal
from kvstrata.contract.manifest.evidence import (
    GatherEvidence,
    IndexEvidence,
    PartialEvidence,
    ReceiptEvidence,
    SelectorEvidence,
)
from kvstrata.errors import Reason

__all__ = [
    "authority_is_replica",
    "candidates_committed",
    "candidates_distinct",
    "candidates_indexed",
    "gather_support",
    "index_entries",
    "index_frontier",
    "partial_support",
    "paths",
    "replicas_present",
    "selector_coverage",
    "survivors",
]

_DERIVE = "cover committed rows only; publish the rows first, then what is derived from them"


def selector_coverage(evidence: SelectorEvidence) -> None:
    """The proxy covers committed rows."""
    start, stop = evidence.selector.start, evidence.selector.stop
    if not evidence.source.start <= start <= stop <= evidence.source.frontier:
        raise refuse(
            Reason.COVERAGE_BEYOND_FRONTIER,
            "selector.stop",
            f"[{start}, {stop}) is not inside the committed rows [{evidence.source.start}, {evidence.source.frontier})",
            _DERIVE,
        )


def index_entries(evidence: IndexEvidence) -> None:
    """The index holds rows of its proxy, up to the frontier that it names."""
    limit = min(evidence.index.frontier, evidence.selector.stop, evidence.source.frontier)
    previous = evidence.selector.start
    for start, stop in evidence.index.entries:
        if not previous <= start < stop <= limit:
            raise refuse(
                Reason.COVERAGE_BEYOND_FRONTIER,
                "index.entries",
                f"[{start}, {stop}) is not in order inside [{evidence.selector.start}, {limit})",
                _DERIVE,
            )
        previous = stop


def index_frontier(evidence: IndexEvidence) -> None:
    """Every committed row is indexed, or covered by what the index declares for the rest."""
    if evidence.index.frontier > evidence.source.frontier:
        raise refuse(
            Reason.COVERAGE_BEYOND_FRONTIER,
            "index.frontier",
            f"{evidence.index.frontier} is beyond the committed frontier {evidence.source.frontier}",
            _DERIVE,
        )
    if not evidence.index.covers(evidence.source.frontier):
        raise refuse(
            Reason.INDEX_FRONTIER_GAP,
            "index.frontier",
            f"{evidence.index.frontier} leaves rows [{evidence.index.frontier}, {evidence.source.frontier}) uncovered",
            "append them to the index, or declare the exact resident set or the fallback that covers them",
        )


def candidates_committed(evidence: ReceiptEvidence) -> None:
    """Every candidate is a committed position."""
    start, stop = evidence.source.start, evidence.source.frontier
    for position in evidence.lookup.candidates:
        if not start <= position < stop:
            raise refuse(
                Reason.CANDIDATE_BEYOND_FRONTIER,
                "lookup.candidates",
                f"position {position} is not in the committed rows [{start}, {stop})",
                "drop what the search returned; the index does not fit the rows",
            )


def candidates_distinct(evidence: ReceiptEvidence) -> None:
    """No candidate is named twice: its weight would count twice."""
    twice = [position for position, count in Counter(evidence.lookup.candidates).items() if count > 1]
    if twice:
        raise refuse(
            Reason.DUPLICATE_CANDIDATE, "lookup.candidates", f"{twice} are named twice", "remove duplicates first"
        )


def candidates_indexed(evidence: ReceiptEvidence) -> None:
    """Every candidate is an entry of the index, or one of the rows that it declares resident."""
    for position in evidence.lookup.candidates:
        if not evidence.index.may_return(position):
            raise refuse(
                Reason.CANDIDATE_NOT_INDEXED,
                "lookup.candidates",
                f"position {position} is no entry of index generation {evidence.index.generation}",
                "look the rows up again in the index that the receipt names",
            )


def replicas_present(evidence: GatherEvidence) -> None:
    """Each row's copy is published, and the manifest knows it."""
    for row in evidence.rows:
        if row.replica is None or row.known is None or not row.replica.holds(evidence.operation.layer):
            raise refuse(
                Reason.REPLICA_MISSING,
                f"replica[{row.tier}]",
                f"layer {evidence.operation.layer} of position {row.position} has no copy there that may be read",
                "promote the rows first, or name another tier for them",
            )


def authority_is_replica(evidence: GatherEvidence) -> None:
    """What prevents loss is a copy of the rows: neither a proxy nor an index can give them back."""
    for row in evidence.rows:
        chunk = row.chunk
        if chunk is None or not chunk.authority:
            continue
        holder = chunk.replica(chunk.authority)
        if holder is None or not holder.published or not holder.whole:
            raise refuse(
                Reason.PROXY_NOT_RECOVERY_REPLICA,
                "directory.authority",
                f"{chunk.authority!r} holds no whole copy of rows [{chunk.start}, {chunk.stop})",
                "make a published replica the authority; rows cannot be recovered from a proxy or an index",
            )


def survivors(evidence: GatherEvidence) -> None:
    """As many valid copies are left as the directory demands."""
    for row in evidence.rows:
        if row.chunk is not None and row.chunk.valid_replicas < evidence.survivors:
            raise refuse(
                Reason.TOO_FEW_REPLICAS,
                "directory.survivors",
                f"rows [{row.chunk.start}, {row.chunk.stop}) have {row.chunk.valid_replicas} valid copies in epoch "
                f"{row.chunk.epoch}, {evidence.survivors} are demanded",
                "validate another copy, or recompute the rows",
            )


def paths(evidence: GatherEvidence) -> None:
    """Bytes have a legal way from each copy to the destination."""
    for tier in sorted({row.tier for row in evidence.rows}):
        if tier not in evidence.tiers or legal_path(tier, evidence.destination, evidence.tiers) is None:
            raise refuse(
                Reason.NO_LEGAL_PATH,
                f"replica[{tier}]",
                f"the capability records allow no way from there to {evidence.destination!r}",
                "stage the rows in a tier that both sides reach",
            )


def gather_support(evidence: PartialEvidence) -> None:
    """The rows that were gathered are those that the look-up named, in its order."""
    found, wanted = evidence.gather.positions, evidence.lookup.candidates
    require_equal(Reason.SUPPORT_MISMATCH, "gather.positions", found, wanted, "gather the rows again")


def partial_support(evidence: PartialEvidence) -> None:
    """The state is over exactly the rows that were gathered."""
    found, wanted = evidence.partial.support, evidence.gather.positions
    require_equal(Reason.SUPPORT_MISMATCH, "partial.support", found, wanted, "compute the state over all its rows")
