from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.kernels import PartialState


def _state(seed: int, rows: int, spread: float) -> PartialState:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, n, 16, generator=generator) for n in (3, rows, rows))
    return PartialState.of_rows(query * spread, key, value, scale=1.0)


states = st.builds(_state, st.integers(0, 2**20), st.integers(0, 40), st.sampled_from([0.1, 1.0, 30.0]))


def test_of_rows_is_softmax_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 16, generator=generator) for n in (3, 50, 50))
    expected = torch.softmax(query.double() @ key.double().transpose(1, 2) * 0.25, -1) @ value.double()
    state = PartialState.of_rows(query, key, value, 0.25)
    torch.testing.assert_close(state.output(torch.float64), expected, rtol=0, atol=1e-6)


@given(states, states, states)
def test_merge_is_associative_and_commutative_to_rounding(a: PartialState, b: PartialState, c: PartialState) -> None:
    left, right = a.merge(b).merge(c), c.merge(a.merge(b))
    other = a.merge(b.merge(c))
    for one in (right, other):
        assert torch.equal(left.m, one.m)
        torch.testing.assert_close(left.l, one.l, rtol=2e-6, atol=0)
        torch.testing.assert_close(left.u, one.u, rtol=1e-5, atol=1e-4)


@given(states)
def test_no_rows_are_the_neutral_element(state: PartialState) -> None:
    empty = PartialState.empty(2, 3, head_dim=16)
    for merged in (state.merge(empty), empty.merge(state)):
        assert torch.equal(merged.m, state.m)
        assert torch.equal(merged.l, state.l)
        assert torch.equal(merged.u, state.u)
    assert torch.equal(empty.merge(empty).output(), torch.zeros(2, 3, 16))
