"""Codes, collisions and inclusion probabilities, against exact arithmetic and against counted collisions."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.methods import simhash as module
from kvstrata.methods.simhash import (
    MAX_BITS,
    code_dtype,
    collision_counts,
    cosines,
    inclusion_probability,
    log_inclusion_probability,
    simhash,
)


def exact_log_u(cosine: float, bits: int, tables: int) -> float:
    """log u with 600 digits."""
    with localcontext() as context:
        context.prec = 600
        r = Decimal(math.acos(-cosine) / math.pi) ** bits
        return float((1 - (1 - r) ** tables - tables * r * (1 - r) ** (tables - 1)).ln())


def test_bits_have_powers_of_two_and_zero_is_no_bit() -> None:
    planes = torch.tensor([[[1.0, -1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]])  # columns: two tables of two bits
    vectors = torch.tensor([[[1.0, 2.0], [-1.0, 1.0], [0.0, 0.0], [0.0, -1.0]]])
    # Projections of the rows: (1, -1, 3, 2), (-1, 1, 0, 1), (0, 0, 0, 0), (0, 0, -1, -1).
    assert simhash(vectors, planes, 2).tolist() == [[[1, 2, 0, 0], [3, 2, 0, 0]]]


@pytest.mark.parametrize(
    ("bits", "dtype"), [(1, torch.uint8), (8, torch.uint8), (9, torch.int16), (15, torch.int16), (16, torch.int32)]
)
def test_the_largest_code_fits(bits: int, dtype: torch.dtype) -> None:
    planes = torch.ones(1, 3, 2 * bits)
    codes = simhash(torch.ones(1, 1, 3), planes, 2)
    assert codes.dtype == code_dtype(bits) == dtype
    assert codes.flatten().tolist() == [2**bits - 1] * 2
    assert simhash(torch.ones(1, 1, 3), torch.ones(1, 3, 2 * MAX_BITS), 2).flatten().tolist() == [2**MAX_BITS - 1] * 2


def test_passes_of_any_size_give_the_same_codes_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    # Small integers: projections are exact, whatever the order of the sums.
    keys = torch.randint(-3, 4, (2, 37, 8), generator=generator).bfloat16()
    planes = torch.randint(-5, 6, (2, 8, 300 * 3), generator=generator).float()
    centre = torch.randint(-2, 3, (2, 8), generator=generator).float()
    codes = simhash(keys, planes, 300, centre)
    counts = collision_counts(codes[:, :, :3], codes)
    # Each bit and table by itself, in plain terms.
    bits = ((keys.float() - centre[:, None]) @ planes > 0).long().view(2, 37, 300, 3)
    plain = (bits * torch.tensor([1, 2, 4])).sum(-1)
    assert torch.equal(codes.long(), plain.transpose(1, 2))
    assert torch.equal(counts.long(), (plain[:, :3, None] == plain[:, None]).sum(-1))
    assert counts[:, 0, 0].tolist() == [300, 300]  # more than a byte counts
    monkeypatch.setattr(module, "PROJECTIONS_PER_PASS", 2 * 300 * 3 * 5)
    monkeypatch.setattr(module, "ROWS_PER_PASS", 7)
    assert torch.equal(simhash(keys, planes, 300, centre), codes)
    assert torch.equal(collision_counts(codes[:, :, :3], codes), counts)


def test_no_rows() -> None:
    codes = simhash(torch.zeros(2, 0, 4), torch.ones(1, 4, 6), 3)
    assert codes.shape == (2, 3, 0)
    assert collision_counts(torch.zeros(2, 3, 5, dtype=codes.dtype), codes).shape == (2, 5, 0)


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (3, 8), (10, 150), (16, 4096), (24, 300)])
def test_log_u_is_exact_where_u_is_tiny_and_where_it_is_one(bits: int, tables: int) -> None:
    cosine = torch.cat(
        (torch.linspace(-1 + 1e-9, 1 - 1e-9, 301, dtype=torch.float64), torch.tensor([-1 + 1e-10], dtype=torch.float64))
    )
    found = log_inclusion_probability(cosine, bits, tables)
    wanted = torch.tensor([exact_log_u(c, bits, tables) for c in cosine.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    assert log_inclusion_probability(torch.tensor([1.0]), bits, tables).item() == 0.0


@given(st.floats(-1, 1), st.integers(1, MAX_BITS), st.integers(2, 4096))
def test_u_is_a_probability_and_never_zero(cosine: float, bits: int, tables: int) -> None:
    log_u = log_inclusion_probability(torch.tensor([cosine]), bits, tables)
    assert torch.isfinite(log_u).all()
    assert 0 < inclusion_probability(torch.tensor([cosine]), bits, tables).item() <= 1
    # More tables catch more; more bits catch less; nearer keys are caught more often.
    slack = 1e-9
    assert log_inclusion_probability(torch.tensor([cosine]), bits, tables + 1).item() >= log_u.item() - slack
    nearer = torch.tensor([min(1.0, cosine + 0.01)])
    assert log_inclusion_probability(nearer, bits, tables).item() >= log_u.item() - slack
    if bits < MAX_BITS:
        assert log_inclusion_probability(torch.tensor([cosine]), bits + 1, tables).item() <= log_u.item() + slack


@pytest.mark.parametrize(("bits", "tables"), [(1, 3), (2, 5), (3, 8), (4, 20)])
def test_u_is_how_often_rows_are_sampled(bits: int, tables: int) -> None:
    """Over 20,000 draws of the planes, within 4.5 standard deviations for each of 8 angles."""
    draws, dim = 20_000, 5
    generator = torch.Generator().manual_seed(11)
    query = torch.zeros(1, dim)
    query[0, 0] = 3.0
    angles = torch.tensor([0.0, 0.3, 0.8, 1.2, math.pi / 2, 1.9, 2.5, 3.0])
    keys = torch.zeros(8, dim)
    keys[:, 0], keys[:, 2] = torch.cos(angles), torch.sin(angles)
    keys *= torch.linspace(0.1, 20, 8).unsqueeze(-1)
    planes = torch.randn(draws, dim, tables * bits, generator=generator)
    codes = simhash(keys.expand(draws, -1, -1), planes, tables)
    sampled = collision_counts(simhash(query.expand(draws, -1, -1), planes, tables), codes)[:, 0] >= 2
    u = inclusion_probability(cosines(query, keys)[0], bits, tables)
    deviation = torch.sqrt(u * (1 - u) / draws)
    assert ((sampled.double().mean(0) - u).abs() <= 4.5 * deviation + 1e-12).all()


def test_a_zero_vector_is_sampled_as_at_a_right_angle() -> None:
    """Its bits are all 0, and the bits of another vector are fair coins; two zero vectors always agree."""
    draws, bits, tables = 20_000, 2, 5
    planes = torch.randn(draws, 4, tables * bits, generator=torch.Generator().manual_seed(5))
    vectors = torch.tensor([[0.0, 0, 0, 0], [1.0, -2, 0, 4]]).expand(draws, -1, -1)
    codes = simhash(vectors, planes, tables)
    sampled = (collision_counts(codes, codes) >= 2).double().mean(0)
    u = inclusion_probability(cosines(vectors[0], vectors[0]), bits, tables)
    right_angle = math.exp(exact_log_u(0.0, bits, tables))
    torch.testing.assert_close(u, torch.tensor([[1.0, right_angle], [right_angle, 1.0]], dtype=torch.float64))
    assert (sampled - u).abs().max() <= 4.5 * math.sqrt(right_angle * (1 - right_angle) / draws)


def test_cosines_stay_within_one_for_vectors_of_any_length() -> None:
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(1, 500, 96, generator=generator)
    for scale in (1e-38, 1e-20, 1.0, 1e18, 1e36):
        found = cosines(base * scale, torch.cat((base * 3, -base), dim=1))
        assert torch.isfinite(found).all()
        assert found.abs().max() <= 1
        torch.testing.assert_close(found[0, :, :500].diagonal(), torch.ones(500))
        torch.testing.assert_close(found[0, :, 500:].diagonal(), -torch.ones(500))
    tiny = torch.full((1, 1, 4), torch.finfo(torch.float32).smallest_normal / 64)
    torch.testing.assert_close(cosines(tiny, tiny), torch.ones(1, 1, 1))
