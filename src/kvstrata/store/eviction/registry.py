"""Which policies there are, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.store.eviction.expected_value import ExpectedValue, ExpectedValueConfig
from kvstrata.store.eviction.fifo import Fifo, FifoConfig
from kvstrata.store.eviction.interface import EvictionPolicy
from kvstrata.store.eviction.lfu import Lfu, LfuConfig
from kvstrata.store.eviction.lru import Lru, LruConfig

__all__ = ["POLICIES", "PolicyConfig", "make_policy"]

PolicyConfig = LruConfig | LfuConfig | FifoConfig | ExpectedValueConfig

POLICIES: Mapping[str, tuple[type[PolicyConfig], Callable[[Any], EvictionPolicy[Any]]]] = MappingProxyType(
    {
        "lru": (LruConfig, Lru),
        "lfu": (LfuConfig, Lfu),
        "fifo": (FifoConfig, Fifo),
        "expected_value": (ExpectedValueConfig, ExpectedValue),
    }
)
"""Name -> class of its configuration and class of the policy."""


def make_policy(policy: str | PolicyConfig) -> EvictionPolicy[Any]:
    """A new, empty policy: by name with its default configuration, or for a configuration.

    Errors: `ConfigurationError` for a name that is not in `POLICIES`.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"policy={policy!r} is not one of {', '.join(sorted(POLICIES))}"
            )
        config_class, make = POLICIES[policy]
        return make(config_class())
    for config_class, make in POLICIES.values():
        if isinstance(policy, config_class):
            return make(policy)
    raise ConfigurationError(Reason.INVALID_ARGUMENT, f"policy={policy!r} is neither a name nor a configuration")
