"""A model reads more than its memory holds, answers, stops; a new process answers again. Every claim is measured.

The parent never loads the model. The cold run, the restored run and the stock run are processes of their own, so that
none profits from what another left in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.lab.demo_checks import Check, run_checks
from kvstrata.lab.demo_job import RESTORED, DemoJob
from kvstrata.lab.demo_process import Progress, StageFailure, run_stages
from kvstrata.lab.report import write_report
from kvstrata.store import Store

__all__ = ["FULL_TOKENS", "QUICK_TOKENS", "DemoOptions", "DemoOutcome", "run_demo"]

FULL_TOKENS, QUICK_TOKENS = 6144, 1280
_FEWEST_NEW_TOKENS, _QUICK_NEW_TOKENS = 2, 16


@dataclass(frozen=True)
class DemoOptions:
    """out: directory of the results. tokens: length of the prompt; by default 6144, or 1280 when `quick`.

    restores: processes that restore one after the other, each what the one before saved.
    store: a directory to keep; without it one below `out`, removed when all went well. The others are as for
    `kvstrata.attach` and `kvstrata.load_model`.
    """

    out: Path
    model: str = "smollm2"
    dtype: str = "auto"
    quick: bool = False
    tokens: int | None = None
    new_tokens: int = 32
    budget: str | None = None
    store: Path | None = None
    seed: int = 0
    restores: int = 1


@dataclass(frozen=True)
class DemoOutcome:
    """summary: what was also written to summary.json. failure: the stage that did not finish, if any."""

    summary: dict[str, Any]
    failure: StageFailure | None
    work: Path | None

    @property
    def passed(self) -> bool:
        """Whether every stage finished and no check failed."""
        return self.failure is None and all(check["ok"] is not False for check in self.summary["checks"])


def run_demo(options: DemoOptions, progress: Progress) -> DemoOutcome:
    """Run all stages; write summary.json and report.html into `options.out`. Blocks for a minute or more.

    progress: called with stage, activity, done and total. A stage that fails ends the run; what is known by then is
    written all the same. Errors: `ConfigurationError` for options that make no sense or a directory that cannot be
    written, `StoreError` for a store that cannot be used.
    """
    tokens = options.tokens if options.tokens is not None else QUICK_TOKENS if options.quick else FULL_TOKENS
    for field, value, least in (
        ("tokens", tokens, 1),
        ("new_tokens", options.new_tokens, _FEWEST_NEW_TOKENS),
        ("restores", options.restores, 1),
    ):
        if value < least:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} is {value}", f"use {least} or more")
    started = time.perf_counter()
    with _work_directory(options.out) as work:
        store = options.store or work / "store"
        with Store(store) as opened:
            opened.require_writable()
        job = DemoJob(
            model=options.model,
            dtype=options.dtype,
            tokens=tokens,
            new_tokens=options.new_tokens,
            budget=options.budget,
            store=str(store.expanduser().resolve()),
            work=str(work.resolve()),
            salt=secrets.token_hex(8),
            seed=options.seed,
            restores=options.restores,
        )
        if options.quick:
            job = replace(job, rounds=job.rounds // 2, new_tokens=min(job.new_tokens, _QUICK_NEW_TOKENS))
        job.write(job.file("job.json"))
        results, failure = _run_stages(job, progress)
        summary = _summary(job, results, options.quick)
        if failure is None:
            progress("verify", "verifying the store", 0, 0)
            summary["store_verification"] = _verify(store)
            checks = run_checks(summary, quick=options.quick)
        else:
            checks = [Check(f"stage {failure.stage} finishes", False, failure.detail)]
            summary["failure"] = failure.to_json()
        summary["checks"] = [check.to_json() for check in checks]
        summary["seconds"] = time.perf_counter() - started
        _write(options.out / "summary.json", json.dumps(summary, indent=2) + "\n")
        if failure is None:
            progress("report", "drawing", 0, 0)
        _write(options.out / "report.html", write_report(summary))
    if failure is None:
        shutil.rmtree(work, ignore_errors=True)
    return DemoOutcome(summary, failure, work if failure else None)


def _run_stages(job: DemoJob, progress: Progress) -> tuple[dict[str, dict[str, Any]], StageFailure | None]:
    results: dict[str, dict[str, Any]] = {}
    for stages in job.processes:
        for stage, result in zip(stages, run_stages(stages, job, progress), strict=False):
            if isinstance(result, StageFailure):
                return results, result
            results[stage] = result
    return results, None


def _summary(job: DemoJob, results: Mapping[str, Mapping[str, Any]], quick: bool) -> dict[str, Any]:
    """Every key of the summary; `None` for what was not reached."""
    stages = ("prepare", "cold", RESTORED, "stock", "timing")
    prepared, cold, back, stock, timing = (results.get(stage, {}) for stage in stages)
    restored = [results[stage] for stage in job.restored_stages if stage in results]
    ledger, cold_ledger = back.get("ledger") or {}, cold.get("ledger") or {}
    median = timing.get("median_ms") or {}
    faster = min(("sdpa", "eager"), key=lambda name: median[name]) if median else None
    return {
        "model": job.model,
        "model_identity": prepared.get("identity"),
        "dtype": prepared.get("dtype"),
        "dtype_reason": prepared.get("dtype_reason"),
        "quick": quick,
        "prompt_tokens": job.tokens,
        "new_tokens": job.new_tokens,
        "history_tokens": cold.get("history_tokens"),
        "history_bytes": cold.get("history_bytes"),
        "device_budget_bytes": cold.get("device_budget_bytes"),
        "peak_device_bytes": _most(
            cold_ledger.get("peak_device_bytes"), *(run["ledger"]["peak_device_bytes"] for run in restored)
        ),
        "rss_growth_bytes": _most(cold.get("rss_growth_bytes"), *(run["rss_growth_bytes"] for run in restored)),
        "stock_rss_growth_bytes": stock.get("rss_growth_bytes"),
        "chunk_tokens": cold.get("chunk_tokens"),
        "prefill_chunk": cold.get("prefill_chunk"),
        "kernel": cold.get("kernel"),
        "cold_first_token_s": cold.get("first_token_s"),
        "restored_first_token_s": back.get("first_token_s"),
        "stock_first_token_s": stock.get("first_token_s"),
        "stock_prefill_attention": stock.get("attention"),
        "restored_tokens": ledger.get("tokens_restored"),
        "recomputed_tokens": ledger.get("tokens_recomputed"),
        "same_tokens": back["tokens"] == cold["tokens"] if back else None,
        "max_logprob_difference": back.get("max_logprob_difference"),
        "restores": [_restored(run, cold) for run in restored],
        "stock_same_tokens": stock["tokens"] == cold["tokens"] if stock else None,
        "stock_max_logprob_difference": stock.get("max_logprob_difference"),
        "decode_ms_per_token": _mean(
            cold.get("decode_ms_per_token"), *(run["decode_ms_per_token"] for run in restored)
        ),
        "resident_decode_ms_per_token": median.get("kvstrata"),
        "baseline_decode_ms_per_token": median.get(faster),
        "baseline_attention": faster,
        "timing_ms": median or None,
        "timing_quartiles_ms": timing.get("quartiles_ms"),
        "timing_samples": timing.get("samples"),
        "question": prepared.get("question"),
        "expected_answer": prepared.get("expected_answer"),
        "answer": cold.get("answer"),
        "tokens": cold.get("tokens"),
        "save": cold.get("save"),
        "restore": back.get("restore"),
        "ledger": ledger or None,
        "cold_ledger": cold_ledger or None,
        "store_verification": None,
        "trace": cold.get("trace"),
        "stage_seconds": {stage: result["seconds"] for stage, result in results.items()},
        "seed": job.seed,
        "environment": prepared.get("environment"),
        "failure": None,
    }


def _restored(run: Mapping[str, Any], cold: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "first_token_s": run["first_token_s"],
        "restored_tokens": run["ledger"]["tokens_restored"],
        "recomputed_tokens": run["ledger"]["tokens_recomputed"],
        "same_tokens": run["tokens"] == cold["tokens"],
        "max_logprob_difference": run["max_logprob_difference"],
    }


def _most(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mean(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _verify(store: Path) -> dict[str, int]:
    with Store(store, create=False) as opened:
        verdicts = list(opened.verify())
    return {"chunks": len(verdicts), "damaged": sum(not verdict.sound for verdict in verdicts)}


def _write(path: Path, text: str) -> None:
    """Replace the file whole, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def _work_directory(out: Path) -> Iterator[Path]:
    """A new directory below `out`; those of runs that are over are removed."""
    work = out / f"run-{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for earlier in out.glob("run-*"):
            if (earlier / "job.json").exists() and not _alive(earlier.name.removeprefix("run-")):
                shutil.rmtree(earlier, ignore_errors=True)
        work.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from error
    yield work


def _alive(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        Reason.INVALID_ARGUMENT, f"{path} cannot be written: {error.strerror}", "name another directory with --out"
    )
