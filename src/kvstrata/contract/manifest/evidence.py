"""What each check is shown: the record that was presented beside what is the case now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstrata.contract.capability import TierCapability
from kvstrata.contract.manifest.directory_state import ChunkState, ReplicaState
from kvstrata.contract.manifest.operation import QueryOperation
from kvstrata.contract.manifest.publication import IndexPublication, SelectorPublication
from kvstrata.contract.manifest.receipts import GatherReceipt, LookupReceipt, PartialReceipt
from kvstrata.contract.manifest.retrieval import RetrievalManifest
from kvstrata.contract.manifest.source import SourceBinding
from kvstrata.contract.manifest.tensor import TensorContract
from kvstrata.contract.states import SnapshotState

__all__ = [
    "GatherEvidence",
    "IndexEvidence",
    "LookupEvidence",
    "PartialEvidence",
    "ReceiptEvidence",
    "RowEvidence",
    "SelectorEvidence",
    "extended",
]


@dataclass(frozen=True, slots=True)
class SelectorEvidence:
    """source, tensor: of the rows now. digests: source digest that the history had at each frontier so far.
    selector, selector_state: the live snapshot."""

    source: SourceBinding
    tensor: TensorContract
    digests: Mapping[int, str]
    selector: SelectorPublication
    selector_state: SnapshotState


@dataclass(frozen=True, slots=True)
class IndexEvidence(SelectorEvidence):
    """index, index_state: the live snapshot."""

    index: IndexPublication
    index_state: SnapshotState


@dataclass(frozen=True, slots=True)
class LookupEvidence(IndexEvidence):
    """manifest, operation: as presented. clock_origin: of the store's clock."""

    manifest: RetrievalManifest
    operation: QueryOperation
    clock_origin: str


@dataclass(frozen=True, slots=True)
class ReceiptEvidence(LookupEvidence):
    """lookup: as presented."""

    lookup: LookupReceipt


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """One row to be copied: from which tier, its chunk now, and its chunk as the manifest knows it."""

    position: int
    tier: str
    chunk: ChunkState | None
    recorded: ChunkState | None

    @property
    def replica(self) -> ReplicaState | None:
        """The copy it comes from, as it is now."""
        return None if self.chunk is None else self.chunk.replica(self.tier)

    @property
    def known(self) -> ReplicaState | None:
        """The same copy as the manifest knows it."""
        return None if self.recorded is None else self.recorded.replica(self.tier)


@dataclass(frozen=True, slots=True)
class GatherEvidence(ReceiptEvidence):
    """rows: one for each candidate. survivors: valid copies that each chunk needs. destination: its tier."""

    rows: tuple[RowEvidence, ...]
    survivors: int
    tiers: Mapping[str, TierCapability]
    destination: str


@dataclass(frozen=True, slots=True)
class PartialEvidence(ReceiptEvidence):
    """gather, partial: as presented. allocation: generation of the destination slot now. event: of its visibility."""

    gather: GatherReceipt
    partial: PartialReceipt
    allocation: int
    event: int


def extended(evidence: SelectorEvidence, **more: Any) -> dict[str, Any]:
    """The fields of `evidence` and `more`, for the evidence that goes further."""
    return {field.name: getattr(evidence, field.name) for field in fields(evidence)} | more
