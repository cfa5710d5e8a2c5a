"""What the demo claims, checked against what it measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Check", "run_checks"]

_RSS_ALLOWANCE = 64 << 20
_SPEEDUP, _QUICK_SPEEDUP = 20.0, 5.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Check:
    """ok: True or False; `None` for what is told and not judged."""

    name: str
    ok: bool | None
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_checks(summary: Mapping[str, Any], *, quick: bool) -> list[Check]:
    """All checks of a complete summary. quick: a short history, where restoring gains less."""
    history, budget = summary["history_bytes"], summary["device_budget_bytes"]
    peak, growth = summary["peak_device_bytes"], summary["rss_growth_bytes"]
    cold, restores = summary["cold_first_token_s"], summary["restores"]
    back = max(run["first_token_s"] for run in restores)
    resident, baseline = summary["resident_decode_ms_per_token"], summary["baseline_decode_ms_per_token"]
    wanted = _QUICK_SPEEDUP if quick else _SPEEDUP
    difference, verified = max(run["max_logprob_difference"] for run in restores), summary["store_verification"]
    restored, recomputed = (sum(run[key] for run in restores) for key in ("restored_tokens", "recomputed_tokens"))
    processes = f" in {len(restores)} processes" if len(restores) > 1 else ""
    expected, answer = summary["expected_answer"], summary["answer"]
    return [
        Check(
            "history is at least 4 times the budget",
            history >= 4 * budget,
            f"{_mib(history)} of history, {_mib(budget)} of budget: {history / budget:.2f} times",
        ),
        Check("device memory stays in the budget", peak <= budget, f"peak {_mib(peak)} of {_mib(budget)}"),
        Check(
            "the process grows by no more than the budget and 64 MiB",
            growth is not None and growth <= budget + _RSS_ALLOWANCE,
            f"{_mib(growth)} after the warm-up, {_mib(budget + _RSS_ALLOWANCE)} allowed",
        ),
        Check(
            "the restored process gives the same tokens",
            all(run["same_tokens"] for run in restores),
            f"{summary['new_tokens']} greedy tokens compared{processes}",
        ),
        Check(
            "the restored answer is bit-identical",
            difference == 0.0,
            f"largest difference of log-probabilities{processes}: {difference:g}",
        ),
        Check(
            "nothing was computed again",
            recomputed == 0,
            f"{restored} tokens restored, {recomputed} recomputed{processes}",
        ),
        Check(
            f"the first token comes at least {wanted:g} times sooner after a restore",
            cold >= wanted * back,
            f"{cold:.2f} s cold, {back:.3f} s restored{' at most' if processes else ''}: {cold / back:.0f} times",
        ),
        Check(
            "decoding in memory is no slower than the faster stock attention",
            resident <= baseline,
            f"{resident:.1f} ms a token, stock {baseline:.1f} ms ({summary['baseline_attention']}); "
            f"medians of {summary['timing_samples']} steps",
        ),
        Check(
            "the store verifies clean",
            verified["damaged"] == 0 and verified["chunks"] > 0,
            f"{verified['chunks']} chunks read, {verified['damaged']} damaged",
        ),
        Check(
            "the answer holds the planted fact",
            None,
            f"{'yes' if expected.casefold() in answer.casefold() else 'no'}: expected {expected!r}, got {answer!r}",
        ),
        Check(
            "the stock cache gives the same tokens",
            None,
            f"{'yes' if summary['stock_same_tokens'] else 'no'}; largest difference of log-probabilities "
            f"{summary['stock_max_logprob_difference']:.2g}",
        ),
    ]


def _mib(count: float | None) -> str:
    return "unknown" if count is None else f"{count / _MIB:.1f} MiB"
