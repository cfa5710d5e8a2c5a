"""How bytes move safely: the durable store, the directory of replicas, publication and promotion.

Importing this package, as the durable half of it, does not import PyTorch.
"""

from __future__ import annotations

from kvstrata.store.audit import Finding, FindingKind
from kvstrata.store.catalog import Candidate, Catalog, CatalogFigures, Lookup
from kvstrata.store.collection import CollectOutcome, CollectResult, StoreUsage
from kvstrata.store.deletion import EvictResult, Refusal
from kvstrata.store.recovery import RecoveryReport
from kvstrata.store.store import Store
from kvstrata.store.verification import ChunkVerdict

__all__ = [
    "Candidate",
    "Catalog",
    "CatalogFigures",
    "ChunkVerdict",
    "CollectOutcome",
    "CollectResult",
    "EvictResult",
    "Finding",
    "FindingKind",
    "Lookup",
    "RecoveryReport",
    "Refusal",
    "Store",
    "StoreUsage",
]
