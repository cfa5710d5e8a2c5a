"""What has been published, and what is only on its way."""

from __future__ import annotations

from kvstrata.contract.manifest.checks.refusal import refuse
from kvstrata.contract.manifest.evidence import IndexEvidence, LookupEvidence, ReceiptEvidence
from kvstrata.contract.states import SnapshotState
from kvstrata.errors import Reason

__all__ = ["index_published", "index_readable", "selector_published"]

_READABLE = (SnapshotState.PUBLISHED, SnapshotState.RETIRED)


def selector_published(evidence: IndexEvidence) -> None:
    """An index may stand on a published proxy only."""
    if evidence.selector_state not in _READABLE:
        raise _refusal("selector", evidence.selector.generation, evidence.selector_state)


def index_published(evidence: LookupEvidence) -> None:
    """New look-ups read a published index, and none that is being retired."""
    if evidence.index_state is not SnapshotState.PUBLISHED:
        raise _refusal("index", evidence.index.generation, evidence.index_state)


def index_readable(evidence: ReceiptEvidence) -> None:
    """A look-up that began before its index was retired may be finished."""
    if evidence.index_state not in _READABLE:
        raise _refusal("index", evidence.index.generation, evidence.index_state)


def _refusal(kind: str, generation: int, state: SnapshotState) -> Exception:
    return refuse(
        Reason.SNAPSHOT_NOT_PUBLISHED,
        f"{kind}.state",
        f"{kind} generation {generation} is {state}",
        "publish rows, then the proxy, then the index; look up in the newest one that is published",
    )
