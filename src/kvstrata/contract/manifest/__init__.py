"""Manifest, operations and receipts of retrieval, as frozen records, and the order in which they are checked."""

from __future__ import annotations

from kvstrata.contract.manifest.directory_state import ChunkState, DirectoryState, ReplicaState
from kvstrata.contract.manifest.operation import Fallback, FallbackDecision, QueryOperation
from kvstrata.contract.manifest.publication import (
    Exactness,
    IndexPublication,
    ResidentSet,
    SelectorPublication,
)
from kvstrata.contract.manifest.receipts import (
    DeletionReceipt,
    GatherReceipt,
    LookupReceipt,
    LookupSemantics,
    PartialReceipt,
)
from kvstrata.contract.manifest.retrieval import RetrievalManifest
from kvstrata.contract.manifest.source import SourceBinding, source_digest
from kvstrata.contract.manifest.tensor import TensorContract

__all__ = [
    "ChunkState",
    "DeletionReceipt",
    "DirectoryState",
    "Exactness",
    "Fallback",
    "FallbackDecision",
    "GatherReceipt",
    "IndexPublication",
    "LookupReceipt",
    "LookupSemantics",
    "PartialReceipt",
    "QueryOperation",
    "ReplicaState",
    "ResidentSet",
    "RetrievalManifest",
    "SelectorPublication",
    "SourceBinding",
    "TensorContract",
    "source_digest",
]
