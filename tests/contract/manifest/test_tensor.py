from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.contract.identity import CacheAbi
from kvstrata.contract.manifest import TensorContract
from kvstrata.errors import ConfigurationError


def test_bytes_of_a_small_and_of_a_large_source() -> None:
    small = TensorContract.of(CacheAbi(2, 4, 2, 4, "float16"), 8)
    assert small.query_to_kv == (0, 0, 1, 1)
    assert small.shape == (2, 2, 8, 4)
    assert small.payload_bytes == small.full_bytes == 512
    large = TensorContract.of(CacheAbi(32, 32, 8, 128, "bfloat16"), 32768)
    assert large.token_bytes == 128 * 2**10
    assert large.full_bytes == 4 * 2**30


def test_keys_and_values_are_counted_apart() -> None:
    small = TensorContract.of(CacheAbi(2, 4, 2, 4, "float16"), 8)
    assert replace(small, value_itemsize=1).full_bytes == 384


@pytest.mark.parametrize("heads", [(0, 0, 1), (0, 0, 1, 2), (0, 0, 1, -1)])
def test_a_head_map_that_names_no_head_is_refused(heads: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"query_to_kv=.*must name one of 2 K/V heads for each of 4"):
        TensorContract(2, 4, 2, 8, 4, 2, 2, heads, 512)
