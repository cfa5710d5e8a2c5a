"""Each check fails for what it is there to find, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.lab.demo_checks import run_checks

MIB = 1 << 20
RESTORE: dict[str, Any] = {
    "first_token_s": 1.0,
    "restored_tokens": 99,
    "recomputed_tokens": 0,
    "same_tokens": True,
    "max_logprob_difference": 0.0,
}
GOOD: dict[str, Any] = {
    "history_bytes": 40 * MIB,
    "device_budget_bytes": 10 * MIB,
    "peak_device_bytes": 10 * MIB,
    "rss_growth_bytes": 74 * MIB,
    "cold_first_token_s": 20.0,
    "resident_decode_ms_per_token": 5.0,
    "baseline_decode_ms_per_token": 5.0,
    "baseline_attention": "sdpa",
    "timing_samples": 32,
    "new_tokens": 32,
    "restores": [RESTORE],
    "store_verification": {"chunks": 3, "damaged": 0},
    "expected_answer": "saffron",
    "answer": "It is Saffron.",
    "stock_same_tokens": True,
    "stock_max_logprob_difference": 1e-5,
}


def _failed(quick: bool = False, **changes: Any) -> list[str]:
    return [check.name for check in run_checks(GOOD | changes, quick=quick) if check.ok is False]


def test_a_good_run_passes_at_its_limits() -> None:
    assert _failed() == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"history_bytes": 40 * MIB - 1}, "at least 4 times the budget"),
        ({"peak_device_bytes": 10 * MIB + 1}, "stays in the budget"),
        ({"rss_growth_bytes": 74 * MIB + 1}, "grows by no more"),
        ({"resident_decode_ms_per_token": 5.1}, "no slower"),
        ({"store_verification": {"chunks": 3, "damaged": 1}}, "verifies clean"),
        ({"store_verification": {"chunks": 0, "damaged": 0}}, "verifies clean"),
    ],
)
def test_each_fault_fails_its_own_check_only(changes: dict[str, Any], name: str) -> None:
    failed = _failed(**changes)
    assert len(failed) == 1
    assert name in failed[0]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"same_tokens": False}, "same tokens"),
        ({"max_logprob_difference": 1e-12}, "bit-identical"),
        ({"recomputed_tokens": 1}, "computed again"),
        ({"first_token_s": 1.01}, "20 times sooner"),
    ],
)
def test_a_fault_of_any_restored_process_counts(changes: dict[str, Any], name: str, place: int) -> None:
    runs = [RESTORE | (changes if number == place else {}) for number in range(3)]
    failed = _failed(restores=runs)
    assert len(failed) == 1
    assert name in failed[0]


def test_a_quick_run_need_gain_less_by_restoring() -> None:
    assert _failed(quick=True, restores=[RESTORE | {"first_token_s": 4.0}]) == []
    assert len(_failed(quick=True, restores=[RESTORE | {"first_token_s": 4.1}])) == 1


def test_the_answer_itself_is_told_and_not_judged() -> None:
    told = {check.name: check for check in run_checks(GOOD | {"answer": "No idea."}, quick=False) if check.ok is None}
    assert told["the answer holds the planted fact"].detail.startswith("no")
    assert _failed(answer="No idea.", stock_same_tokens=False) == []


def test_unknown_growth_is_not_a_pass() -> None:
    assert len(_failed(rss_growth_bytes=None)) == 1
