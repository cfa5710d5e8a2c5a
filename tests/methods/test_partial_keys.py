from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.method import Owner, QueryVariant
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.partial_keys import PartialKeys, SpeculationRecord
from kvstrata.methods.row_pool import RowPool
from kvstrata.methods.skewing import PartialBasis, QuerySample, skew, skew_basis


def _index(keys: torch.Tensor, columns: int, pool: RowPool | None = None) -> PartialKeys:
    basis = PartialBasis.of(skew_basis(keys, keys.shape[0]), torch.arange(columns).expand(keys.shape[0], -1))
    index = PartialKeys()
    index.begin(basis, 1, pool or RowPool(keys.shape[0]), keys.dtype)
    return index


def _keys(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    st.integers(1, 60), st.lists(st.integers(1, 9)), st.integers(1, 8), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_rows_that_came_one_by_one_are_those_of_the_whole(
    tokens: int, cuts: list[int], columns: int, dtype: torch.dtype
) -> None:
    keys = _keys(tokens, dtype)
    whole, grown = _index(keys, columns), _index(keys, columns)
    whole.extend(0, keys)
    for length in [*cuts, tokens]:
        piece = keys[:, grown.frontier : grown.frontier + length]
        if piece.shape[1]:
            grown.extend(grown.frontier, piece)
    assert grown.frontier == whole.frontier == tokens
    assert grown.keys.dtype == dtype
    # One rounding of the stored dtype may fall the other way.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(grown.keys.float(), whole.keys.float(), rtol=tolerance, atol=1e-5)


def test_scores_of_all_columns_are_the_full_ones() -> None:
    keys = _keys(30)
    index = _index(keys, 8)
    index.extend(0, keys)
    queries = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1))
    expected = (queries @ keys.repeat_interleave(3, 0).mT).amax(1)
    torch.testing.assert_close(index.scores(queries), expected, rtol=1e-4, atol=1e-4)


def test_scores_of_some_columns_are_products_of_the_parts() -> None:
    keys = _keys(30)
    index = _index(keys, 3)
    index.extend(0, keys)
    assert index.basis is not None
    queries = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(1))
    parts = skew(queries, index.basis.projector) @ skew(keys, index.basis.projector).mT
    torch.testing.assert_close(index.scores(queries), parts[:, 0])


def test_a_gap_is_refused() -> None:
    index = _index(_keys(4), 2)
    with pytest.raises(RetrievalError, match="rows from 3 on were appended to partial keys that end at 0") as refused:
        index.extend(3, _keys(4))
    assert refused.value.reason is Reason.INDEX_FRONTIER_GAP


def test_bytes_and_generations() -> None:
    keys = _keys(8, torch.bfloat16)
    index = _index(keys, 4)
    index.extend(0, keys)
    assert index.nbytes == 2 * 8 * 4 * 2 + 2 * 8 * 4 * 4 + 2 * 4 * 8  # partial keys, projector, columns
    assert index.generation == 1
    before = index.nbytes
    index.extend(8, keys[:, :1])
    assert index.generation == 2
    assert index.nbytes == before + 2 * 4 * 2  # an eighth more room
    pooled = _index(keys, 4, RowPool(2, rows=3))
    pooled.extend(0, keys)
    assert pooled.nbytes == before + 2 * 8 * (1 + 8)
    sample = QuerySample(16)
    sample.add(0, keys)
    assert PartialKeys(sample).nbytes == 2 * 8 * 8 * 2


def test_truncation_and_what_comes_after_it() -> None:
    keys, other = _keys(20), _keys(20, seed=1)
    index, expected = _index(keys, 4), _index(keys, 4)
    index.extend(0, keys)
    index.truncate(12)
    assert index.frontier == 12
    assert index.keys.shape == (2, 12, 4)
    index.extend(12, other[:, 12:])
    expected.extend(0, torch.cat([keys[:, :12], other[:, 12:]], dim=1))
    torch.testing.assert_close(index.keys, expected.keys, rtol=1e-5, atol=1e-5)
    assert index.pool.size == 20


def test_copies_do_not_share_rows() -> None:
    keys = _keys(9)
    index = _index(keys, 4)
    index.extend(0, keys[:, :8])
    index.extend(8, keys[:, 8:])
    other = copy.deepcopy(index)
    other.truncate(4)
    other.extend(4, -keys[:, 4:])
    torch.testing.assert_close(index.keys[:, 4:], -other.keys[:, 4:])


def test_a_record_says_how_the_choice_came_about() -> None:
    record = SpeculationRecord(5, Owner.KV_HEAD, 3, QueryVariant.PREDICTED, 1, 5.0, (12, 40), 26, 20)
    assert str(record) == (
        "layer 5, predicted query, 2 kv_head lists, group 3, columns 1, alpha 5.0, passed 12 40, equalised 26, cap 20"
    )
