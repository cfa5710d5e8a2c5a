"""The split of slots never promises more than there are, and gives up only when one layer does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cost.residency import ResidencyPlan, plan_residency, required_slots

LAYERS = st.integers(1, 8)
CHUNKS = st.integers(0, 40)
TAIL = st.integers(0, 4)
SLOTS = st.integers(0, 400)
DEPTH = st.integers(1, 5)


def needed(plan: ResidencyPlan, layers: int, chunks: int, tail: int) -> int:
    return tail * layers + plan.resident_chunks * layers + plan.depth * (chunks - plan.resident_chunks)


@given(SLOTS, LAYERS, CHUNKS, TAIL, DEPTH)
def test_a_plan_fits_and_is_missing_only_when_nothing_would(
    slots: int, layers: int, chunks: int, tail: int, depth: int
) -> None:
    plan = plan_residency(slots, [layers] * chunks, tail * layers, depth)
    assert (plan is None) == (required_slots(layers, chunks, tail) > slots)
    if plan is not None:
        assert 0 <= plan.resident_chunks <= chunks
        assert 0 <= plan.depth <= depth
        assert needed(plan, layers, chunks, tail) <= slots
        assert plan.depth > 0 or plan.resident_chunks == chunks


@given(SLOTS, LAYERS, CHUNKS, TAIL, DEPTH)
def test_one_more_resident_chunk_would_not_fit(slots: int, layers: int, chunks: int, tail: int, depth: int) -> None:
    plan = plan_residency(slots, [layers] * chunks, tail * layers, depth)
    if plan is not None and plan.resident_chunks < chunks:
        more = ResidencyPlan(plan.resident_chunks + 1, plan.depth)
        assert needed(more, layers, chunks, tail) > slots


@given(SLOTS, LAYERS, CHUNKS, TAIL, DEPTH)
def test_more_slots_never_move_more_bytes(slots: int, layers: int, chunks: int, tail: int, depth: int) -> None:
    """At an equal depth; a deeper one may keep fewer chunks, because it hides the time of moving the others."""
    less, more = (plan_residency(n, [layers] * chunks, tail * layers, depth) for n in (slots, slots + 1))
    if less is not None:
        assert more is not None
        assert more.depth == 0 or more.depth >= less.depth
        if more.depth == less.depth:
            assert more.resident_chunks >= less.resident_chunks


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (40, ResidencyPlan(8, 0)),
        (36, ResidencyPlan(8, 0)),
        (35, ResidencyPlan(7, 2)),
        (20, ResidencyPlan(0, 2)),
        (19, ResidencyPlan(2, 1)),
        (12, ResidencyPlan(0, 1)),
        (11, None),
    ],
)
def test_worked_cases(slots: int, expected: ResidencyPlan | None) -> None:
    """Four layers, eight chunks, one open chunk: 4 slots for the tail, 32 for everything, 8 a layer in flight."""
    assert plan_residency(slots, [4] * 8, 4) == expected


def test_an_empty_history_needs_its_tail_only() -> None:
    assert plan_residency(4, [], 4) == ResidencyPlan(0, 0)
    assert plan_residency(3, [], 4) is None
    assert required_slots(4, 0, 1) == 4


@given(st.lists(st.integers(1, 8), max_size=20), TAIL, SLOTS, DEPTH)
def test_chunks_of_different_cost_share_the_memory(costs: list[int], tail: int, slots: int, depth: int) -> None:
    plan = plan_residency(slots, costs, tail, depth)
    assert (plan is None) == (tail + len(costs) > slots and tail + sum(costs) > slots)
    if plan is not None:
        cold = len(costs) - plan.resident_chunks
        assert tail + sum(costs[: plan.resident_chunks]) + plan.depth * cold <= slots
        assert plan.depth > 0 or cold == 0


def test_a_chunk_behind_the_window_of_most_layers_is_kept_cheaply() -> None:
    """Eighteen layers of which three read everything: forty chunks are nearly all kept where six whole ones fit."""
    assert plan_residency(2 * 18 + 4 * 18 + 30 * 3 + 2 * 6, [18] * 4 + [3] * 36, 2 * 18) == ResidencyPlan(34, 2)
    assert plan_residency(2 * 18 + 4 * 18 + 30 * 3 + 2 * 6, [18] * 40, 2 * 18) == ResidencyPlan(5, 2)
