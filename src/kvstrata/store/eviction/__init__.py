"""Who leaves first when room is needed: policies behind one interface, for slots of an arena and for durable chunks."""

from __future__ import annotations

from kvstrata.store.eviction.expected_value import ExpectedValue, ExpectedValueConfig
from kvstrata.store.eviction.fifo import Fifo, FifoConfig
from kvstrata.store.eviction.interface import EvictionPolicy, Usage, Victims
from kvstrata.store.eviction.lfu import Lfu, LfuConfig
from kvstrata.store.eviction.lru import Lru, LruConfig
from kvstrata.store.eviction.registry import POLICIES, PolicyConfig, make_policy

__all__ = [
    "POLICIES",
    "EvictionPolicy",
    "ExpectedValue",
    "ExpectedValueConfig",
    "Fifo",
    "FifoConfig",
    "Lfu",
    "LfuConfig",
    "Lru",
    "LruConfig",
    "PolicyConfig",
    "Usage",
    "Victims",
    "make_policy",
]
