from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.methods.influence import following_weights, influence_of_keys, influence_of_queries

LEAST = torch.finfo(torch.float32).min


@settings(max_examples=40, deadline=None)
@given(kv_heads=st.integers(1, 2), group=st.sampled_from([1, 3, 4]), rows=st.integers(1, 9), window=st.integers(1, 9))
def test_it_is_the_mean_product_with_the_following_queries(kv_heads: int, group: int, rows: int, window: int) -> None:
    make = torch.Generator().manual_seed(rows)
    queries = torch.randn(kv_heads * group, rows - 1 + window, 8, generator=make)
    keys = torch.randn(kv_heads, rows, 8, generator=make)
    got = influence_of_queries(queries, keys, window)
    for head in range(kv_heads * group):
        for row in range(rows):
            products = queries[head, row : row + window] @ keys[head // group, row]
            assert float(got[head, row]) == pytest.approx(float(products.mean()), abs=1e-5)


def test_what_is_not_finite_counts_as_the_least() -> None:
    keys = torch.ones(1, 4, 2)
    keys[0, 1], keys[0, 2] = torch.nan, torch.inf
    queries = torch.ones(1, 5, 2)
    assert influence_of_queries(queries, keys, 2).tolist() == [[2.0, LEAST, LEAST, 2.0]]
    assert influence_of_keys(keys.unsqueeze(1)).tolist() == [[LEAST] * 4]
    assert influence_of_keys(torch.ones(1, 2, 2, 3)).tolist() == [[3.0] * 4]


@pytest.mark.parametrize("rows", [1, 65, 130])
@pytest.mark.parametrize("owners", [2, 6])
def test_weights_are_normalised_over_near_and_far(rows: int, owners: int) -> None:
    make = torch.Generator().manual_seed(3)
    queries, far_queries = torch.randn(2, 6, rows, 8, generator=make)
    keys, far_keys = torch.randn(2, 12, 8, generator=make), torch.randn(owners, 5, 8, generator=make)
    near = torch.rand(rows, 12, generator=make) > 0.3
    near[:, 0] = True
    far = torch.rand(owners, 1, 5, generator=make) > 0.3
    got = following_weights(queries, keys, near, far_queries, far_keys, far, 0.5)
    wanted = torch.zeros(6, 12)
    for head in range(6):
        for row in range(rows):
            close = (keys[head // 3] @ queries[head, row] * 0.5).masked_fill(~near[row], -torch.inf)
            owner = head // (6 // owners)
            distant = (far_keys[owner] @ far_queries[head, row] * 0.5).masked_fill(~far[owner, 0], -torch.inf)
            wanted[head] += torch.softmax(torch.cat((close, distant)), dim=-1)[:12]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    one = torch.ones(1, 1, 4)
    nothing = torch.zeros(1, 1, dtype=torch.bool)
    assert following_weights(one, one, nothing, one, one, nothing.unsqueeze(0), 1.0).tolist() == [[0.0]]
