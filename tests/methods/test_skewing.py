from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_parts import golden
from torch import Tensor

from kvstrata.methods.selection import NO_UNIT
from kvstrata.methods.skewing import (
    ColumnRule,
    PartialBasis,
    QuerySample,
    column_energy,
    fold,
    shared_columns,
    skew,
    skew_basis,
)

seeds = st.integers(0, 2**20)
shapes = st.tuples(
    st.sampled_from([1, 2, 3]), st.sampled_from([1, 3, 4]), st.integers(1, 40), st.sampled_from([1, 5, 16])
)


def _states(shape: tuple[int, int, int, int], seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Queries [kv_heads * group, rows, dim] and keys [kv_heads, rows, dim]; some channels are larger than others."""
    kv_heads, group, rows, dim = shape
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(dim, generator=generator).exp()
    queries = torch.randn(kv_heads * group, rows, dim, generator=generator) * spread
    return queries.to(dtype), torch.randn(kv_heads, rows, dim, generator=generator).to(dtype)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    return queries.double() @ keys.double().repeat_interleave(queries.shape[0] // keys.shape[0], 0).mT


def _up_to_sign(actual: Tensor, expected: Tensor, dim: int) -> None:
    """Equal once each channel has the sign that `expected` gives it. dim: along which a channel lies."""
    signs = torch.where((actual * expected).sum(dim, keepdim=True) < 0, -1.0, 1.0)
    torch.testing.assert_close(actual * signs, expected, rtol=1e-3, atol=1e-4)


def test_basis_is_the_authors() -> None:
    arrays, _ = golden("infinigen")
    basis = skew_basis(arrays["query"][0], 2)
    # They place the directions the other way round.
    _up_to_sign(basis.flip(-1), arrays["skew_matrix"], dim=-2)


def test_folded_weights_are_the_authors() -> None:
    arrays, _ = golden("infinigen")
    basis = skew_basis(arrays["query"][0], 2)
    for name, bias in (("w_q", "b_q"), ("w_k", "b_k")):
        scale = 0.25 if name == "w_q" else 1.0
        weight, folded_bias = fold(
            arrays[name].view(2, 16, 32) * scale, arrays[bias].view(2, 16) * scale, basis.flip(-1)
        )
        assert folded_bias is not None
        both = torch.cat([weight, folded_bias.unsqueeze(-1)], dim=-1)
        _up_to_sign(both, arrays[f"{name}_folded"].view(2, 16, 33), dim=-1)


def test_columns_are_the_authors() -> None:
    arrays, _ = golden("infinigen")
    queries, keys = arrays["query"][0], arrays["key"][0]
    basis = skew_basis(queries, 2)
    energy = column_energy(skew(queries, basis), 2)
    torch.testing.assert_close(energy.flip(-1), arrays["column_abs_sum"], rtol=1e-3, atol=1e-4)
    columns = shared_columns(energy, column_energy(skew(keys, basis), 2), 4, ColumnRule.QUERIES)
    assert sorted((15 - columns).tolist()[0]) == arrays["partial_ids"][0].tolist()
    assert sorted((15 - columns).tolist()[1]) == arrays["partial_ids"][1].tolist()


@given(shapes, seeds, st.sampled_from([torch.float32, torch.bfloat16]))
def test_skewing_leaves_full_scores(shape: tuple[int, int, int, int], seed: int, dtype: torch.dtype) -> None:
    queries, keys = _states(shape, seed, dtype)
    basis = skew_basis(queries, shape[0])
    identity = torch.eye(shape[3]).expand_as(basis)
    torch.testing.assert_close(basis @ basis.mT, identity, rtol=0, atol=1e-5)
    expected = _scores(queries, keys)
    actual = _scores(skew(queries, basis), skew(keys, basis))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max() + 1))


@given(shapes, seeds, st.booleans())
def test_folding_leaves_full_scores(shape: tuple[int, int, int, int], seed: int, biased: bool) -> None:
    kv_heads, group, rows, dim = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 12, generator=generator)
    heads = (kv_heads * group, kv_heads)
    weights = [torch.randn(count, dim, 12, generator=generator) for count in heads]
    biases = [torch.randn(count, dim, generator=generator) if biased else None for count in heads]

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        return hidden @ weight.mT + (0 if bias is None else bias.unsqueeze(1))

    plain = [project(*pair) for pair in zip(weights, biases, strict=True)]
    basis = skew_basis(plain[0], kv_heads)
    folded = [project(*fold(*pair, basis)) for pair in zip(weights, biases, strict=True)]
    for turned, states in zip(folded, plain, strict=True):
        torch.testing.assert_close(turned, skew(states, basis), rtol=1e-4, atol=1e-3)
    expected = _scores(*plain)
    torch.testing.assert_close(_scores(*folded), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max() + 1))


@given(shapes, seeds, st.integers(1, 16), st.sampled_from(ColumnRule))
def test_what_partial_scores_leave_out_is_bounded(
    shape: tuple[int, int, int, int], seed: int, count: int, rule: ColumnRule
) -> None:
    queries, keys = _states(shape, seed)
    basis = skew_basis(queries, shape[0])
    turned = skew(queries, basis), skew(keys, basis)
    energies = [column_energy(states, shape[0]) for states in turned]
    partial = PartialBasis.of(basis, shared_columns(energies[0], energies[1], count, rule))
    parts = [skew(states, partial.projector).double() for states in (queries, keys)]
    rests = [
        (states.double().square().sum(-1) - part.square().sum(-1)).clamp_min(0).sqrt()
        for states, part in zip(turned, parts, strict=True)
    ]
    group = shape[1]
    bound = rests[0].unsqueeze(-1) * rests[1].repeat_interleave(group, 0).unsqueeze(-2)
    exact = _scores(queries, keys)
    slack = 1e-5 * float(exact.abs().max() + 1)
    # Rests of almost nothing come from differences, whose roots are off by more.
    slack += 1e-3 * float(queries.abs().max() * keys.abs().max())
    assert bool(((exact - _scores(*parts)).abs() <= bound + slack).all())


def test_leading_channels_carry_the_queries_energy() -> None:
    queries, _ = _states((2, 3, 64, 16), 1)
    basis = skew_basis(queries, 2)
    energy = skew(queries, basis).square().reshape(2, -1, 16).sum(1)
    assert bool((energy.diff(dim=-1) <= 1e-3 * energy[:, :1]).all())
    raw = queries.square().reshape(2, -1, 16).sum(1).sort(-1, descending=True).values
    assert bool((energy[:, :4].sum(-1) >= raw[:, :4].sum(-1) - 1e-2).all())


def test_few_rows_and_none_make_a_complete_basis() -> None:
    for rows in (0, 1, 3):
        basis = skew_basis(torch.ones(2, rows, 8), 2)
        torch.testing.assert_close(basis @ basis.mT, torch.eye(8).expand(2, -1, -1), rtol=0, atol=1e-6)


def test_basis_does_not_depend_on_the_sign_of_the_samples() -> None:
    queries, _ = _states((2, 1, 30, 8), 5)
    assert torch.equal(skew_basis(queries, 2), skew_basis(-queries, 2))
    assert bool((skew_basis(queries, 2).abs().amax(-2) == skew_basis(queries, 2).amax(-2)).all())


def test_rules_for_columns() -> None:
    queries = torch.tensor([[9.0, 0, 1, 5, 0], [1, 1, 1, 1, 1]])
    keys = torch.tensor([[0.0, 9, 1, 5, 0], [1, 1, 1, 1, 1]])
    # Of equals the lower channels.
    assert shared_columns(queries, keys, 1, ColumnRule.SUM).tolist() == [[3], [0]]
    assert shared_columns(queries, keys, 2, ColumnRule.QUERIES).tolist() == [[0, 3], [0, 1]]
    assert shared_columns(queries, keys, 2, ColumnRule.UNION).tolist() == [[0, 1, 3], [0, 1, NO_UNIT]]
    assert shared_columns(queries, keys, 9, ColumnRule.SUM).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_column_that_fills_up_scores_nothing() -> None:
    basis = skew_basis(torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0)), 2)
    partial = PartialBasis.of(basis, torch.tensor([[0, 3], [2, NO_UNIT]]))
    assert torch.equal(partial.projector[0], basis[0][:, [0, 3]])
    assert torch.equal(partial.projector[1, :, 0], basis[1, :, 2])
    assert not partial.projector[1, :, 1].any()


def test_energy_of_a_group_is_its_mean() -> None:
    skewed = torch.tensor([[[1.0, -2]], [[3, 0]], [[-1, -1]], [[1, 1]]])
    assert column_energy(skewed, 2).tolist() == [[2, 1], [1, 1]]
    assert column_energy(skewed, 4).tolist() == [[1, 2], [3, 0], [1, 1], [1, 1]]


@given(st.integers(1, 200), st.integers(1, 40), st.lists(st.integers(1, 60), max_size=8))
def test_sample_does_not_depend_on_how_the_prefill_was_cut(rows: int, most: int, cuts: list[int]) -> None:
    queries = torch.arange(rows, dtype=torch.float32).view(1, rows, 1)
    whole, pieces = QuerySample(most), QuerySample(most)
    whole.add(0, queries)
    start = 0
    for length in [*cuts, rows]:
        stop = min(rows, start + length)
        if stop > start:
            pieces.add(start, queries[:, start:stop])
        start = stop
    assert torch.equal(whole.positions, pieces.positions)
    assert torch.equal(whole.queries, pieces.queries)
    assert torch.equal(whole.queries.flatten(), whole.positions.float())
    assert 1 <= len(whole.positions) <= most
    assert len(whole.positions) == rows or len(whole.positions) * 2 + 1 >= most
    assert whole.nbytes == 4 * len(whole.positions)


def test_a_sample_keeps_copies() -> None:
    queries = torch.zeros(1, 4, 2)
    sample = QuerySample(8)
    sample.add(0, queries)
    queries.fill_(1)
    assert not sample.queries.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_fp32(dtype: torch.dtype) -> None:
    queries, _ = _states((2, 3, 9, 8), 3, dtype)
    basis = skew_basis(queries, 2)
    assert basis.dtype == skew(queries, basis).dtype == torch.float32
    assert skew(queries, basis[..., :3]).shape == (6, 9, 3)
