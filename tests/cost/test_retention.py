"""The value of keeping a chunk, term by term, and the estimates that go into it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cost.retention import ReuseModel, ValueTerms, capacity_cost_s, layerwise_resume_s
from kvstrata.errors import ConfigurationError

SECONDS = st.floats(0, 1e4)
PROBABILITY = st.floats(0, 1)


def test_worked_value() -> None:
    """Half the time, 8 s are replaced by 2 s; room costs 0.5 s and the write 1 s: 0.5 * 6 - 0.5 - 1."""
    terms = ValueTerms(0.5, recompute_s=8.0, promote_s=2.0, capacity_s=0.5, write_s=1.0)
    assert (terms.value_s, terms.discard_cost_s, terms.keep_cost_s) == (1.5, 4.0, 2.5)


@given(PROBABILITY, SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_value_is_the_formula(p: float, recompute: float, promote: float, capacity: float, write: float) -> None:
    value = ValueTerms(p, recompute, promote, capacity, write).value_s
    assert value == pytest.approx(p * (recompute - promote) - capacity - write, abs=1e-8)


@given(PROBABILITY, PROBABILITY, SECONDS, SECONDS)
def test_likelier_reuse_is_worth_more_exactly_where_promoting_is_quicker(
    p: float, q: float, recompute: float, promote: float
) -> None:
    low, high = (ValueTerms(x, recompute, promote).value_s for x in sorted((p, q)))
    if recompute >= promote:
        assert high >= low - 1e-9
    else:
        assert high <= low + 1e-9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reuse_probability", -0.1),
        ("reuse_probability", 1.1),
        ("recompute_s", -1.0),
        ("promote_s", math.inf),
        ("capacity_s", math.nan),
        ("write_s", -1e-9),
    ],
)
def test_a_term_that_cannot_be_is_refused(field: str, value: float) -> None:
    sound: dict[str, Any] = {"reuse_probability": 0.5, "recompute_s": 1.0, "promote_s": 1.0}
    with pytest.raises(ConfigurationError, match=rf"ValueTerms\.{field}={value} "):
        ValueTerms(**{**sound, field: value})


def test_worked_probability() -> None:
    """One use, one half-life ago, a horizon of two half-lives: a rate of 0.5 ln 2 in a half-life, 1 - 2^(-1)."""
    model = ReuseModel(half_life_s=100.0, horizon_s=200.0)
    assert model.rate_per_s(1, 100.0) == pytest.approx(0.5 * math.log(2) / 100)
    assert model.probability(1, 100.0) == pytest.approx(0.5)
    assert model.probability(2, 100.0) == pytest.approx(0.75)
    assert model.probability(0, 0.0) == 0.0


@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 1e6), st.floats(0, 1e6))
def test_more_uses_make_reuse_likelier_and_age_less_likely(m: int, n: int, age: float, later: float) -> None:
    model = ReuseModel()
    few, many = sorted((m, n))
    young, old = sorted((age, later))
    assert 0 <= model.probability(few, age) <= model.probability(many, age) <= 1
    assert model.probability(n, old) <= model.probability(n, young)


@pytest.mark.parametrize("every_s", [1.0, 7.0, 20.0])
def test_the_rate_of_regular_uses_is_found(every_s: float) -> None:
    """Over a whole interval between two uses, on average; the half-life is five intervals or more."""
    model = ReuseModel(half_life_s=100.0)
    weight = 0.0
    for _ in range(2000):
        weight = model.decayed(weight, every_s) + 1
    steps = 1000
    mean = sum(model.rate_per_s(weight, every_s * (step + 0.5) / steps) for step in range(steps)) / steps
    assert mean == pytest.approx(1 / every_s, rel=1e-6)


@pytest.mark.parametrize("field", ["half_life_s", "horizon_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_a_reuse_model_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"ReuseModel\.{field}={value} "):
        ReuseModel(**{field: value})


@pytest.mark.parametrize(("uses", "age_s", "named"), [(-1, 0.0, "uses=-1"), (1, -0.5, "age_s=-0.5")])
def test_a_past_that_cannot_be_is_refused(uses: float, age_s: float, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ReuseModel().probability(uses, age_s)


def test_capacity_is_priced_by_bytes_and_time() -> None:
    assert capacity_cost_s(2**29, held_s=60.0, price_s_per_gib_s=0.01) == pytest.approx(0.3)
    assert capacity_cost_s(2**29, held_s=60.0, price_s_per_gib_s=0.0) == 0.0
    for bad in ((-1, 1.0, 1.0, "nbytes=-1"), (1, -1.0, 1.0, "held_s=-1"), (1, 1.0, -1.0, "price_s_per_gib_s=-1")):
        with pytest.raises(ConfigurationError, match=bad[3]):
            capacity_cost_s(*bad[:3])


def resume_by_events(layers: int, load_s: float, compute_s: float) -> float:
    """Layer by layer: a layer computes when it has arrived and the one before has computed."""
    computed = 0.0
    for layer in range(layers):
        computed = max((layer + 1) * load_s, computed) + compute_s
    return computed


@given(st.integers(1, 60), st.floats(0, 10), st.floats(0, 10))
def test_the_pipeline_is_that_of_its_events(layers: int, load_s: float, compute_s: float) -> None:
    assert layerwise_resume_s(layers, load_s, compute_s) == pytest.approx(resume_by_events(layers, load_s, compute_s))


def test_worked_pipeline() -> None:
    """Four layers of 12 MiB at 24 GiB/s and 0.1 ms each, 0.45 ms of prefill a layer: 2.803125 ms."""
    load_s = 12 / (24 * 1024) + 0.0001
    assert load_s * 1000 == pytest.approx(0.58828125)
    assert layerwise_resume_s(4, load_s, 0.00045) * 1000 == pytest.approx(2.803125)


@pytest.mark.parametrize(
    ("arguments", "named"), [((0, 1, 1), "layers=0"), ((1, -1, 1), "load_s=-1"), ((1, 1, -1), "compute_s=-1")]
)
def test_a_pipeline_that_cannot_be_is_refused(arguments: tuple[int, float, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        layerwise_resume_s(*arguments)
