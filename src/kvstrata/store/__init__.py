"""How bytes move safely: the durable store, the directory of replicas, publication and promotion.

Importing this package, as the durable half of it, does not import PyTorch.
"""

from __future__ import annotations

from kvstrata.store.collection import CollectOutcome, CollectResult, StoreUsage
from kvstrata.store.store import Store
from kvstrata.store.verification import ChunkVerdict

__all__ = ["ChunkVerdict", "CollectOutcome", "CollectResult", "Store", "StoreUsage"]
