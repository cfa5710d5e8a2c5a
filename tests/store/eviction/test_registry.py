"""Policies by name and by configuration."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.errors import ConfigurationError
from kvstrata.store.eviction import (
    POLICIES,
    ExpectedValue,
    ExpectedValueConfig,
    Fifo,
    FifoConfig,
    Lfu,
    LfuConfig,
    Lru,
    LruConfig,
    make_policy,
)


@pytest.mark.parametrize(
    ("name", "policy", "config"),
    [
        ("lru", Lru, LruConfig()),
        ("lfu", Lfu, LfuConfig(7)),
        ("fifo", Fifo, FifoConfig()),
        ("expected_value", ExpectedValue, ExpectedValueConfig()),
    ],
)
def test_each_is_made_by_name_and_by_configuration(name: str, policy: type, config: Any) -> None:
    assert type(make_policy(name)) is policy
    assert make_policy(name).config == type(config)()
    assert make_policy(config).config is config
    assert make_policy(name) is not make_policy(name)


def test_all_are_listed() -> None:
    assert set(POLICIES) == {"lru", "lfu", "fifo", "expected_value"}


@pytest.mark.parametrize("policy", ["LRU", "", object()])
def test_another_one_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match="policy="):
        make_policy(policy)
