"""First token after a restore in a fresh process, against reading the same bytes and one decode step."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvstrata.engines.transformers import attach, load_model
from kvstrata.errors import KvstrataError, Reason
from kvstrata.lab.bench.filled import fill
from kvstrata.lab.bench.result import BenchReport, BenchRow, environment, median_interval

__all__ = ["bench_restore"]

_SESSION = "bench"


def bench_restore(
    source: str = "smollm2",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    tokens: int = 6144,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """`rounds` fresh processes restore a session of `tokens` rows and compute one token.

    Import and model load are excluded; the clock runs from the call of `restore` to the first logits. Goal: at most
    1.4 x (verified read of the same bytes + one decode step) + 30 ms, all three measured in the same process.
    """
    rows: list[BenchRow] = []
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as folder:
            progress(f"{dtype}: writing a session of {tokens} tokens")
            with attach(load_model(source, dtype=dtype), folder) as memory:
                request = fill(memory, tokens)
                memory.save(_SESSION, request)
            samples = []
            for number in range(rounds):
                progress(f"{dtype}: fresh process {number + 1} of {rounds}")
                samples.append(_fresh_process(source, dtype, folder))
        rows += _rows(dtype, tokens, samples)
    return BenchReport("restore", environment(torch.get_num_threads(), model=source, seed=0), tuple(rows))


def _fresh_process(source: str, dtype: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvstrata.lab.bench.restore_child", source, dtype, folder, _SESSION]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KvstrataError(Reason.INVALID_ARGUMENT, f"the restoring process failed:\n{done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(Path(done.stdout.strip().splitlines()[-1]).read_text(encoding="utf-8"))
    return result


def _rows(dtype: str, tokens: int, samples: list[dict[str, Any]]) -> list[BenchRow]:
    first = median_interval([sample["first_token_ms"] for sample in samples])
    bound = median_interval([1.4 * (sample["read_ms"] + sample["step_ms"]) + 30 for sample in samples])
    ratio = median_interval([s["first_token_ms"] / (1.4 * (s["read_ms"] + s["step_ms"]) + 30) for s in samples])
    name = f"restore.{dtype}.{tokens}"
    return [
        BenchRow(
            f"{name}.first_token",
            first.median,
            "ms",
            bound.median,
            ratio.median,
            "<= 1.4 x (verified read + one step) + 30 ms",
            ratio.median <= 1.0,
            first.n,
            ratio.low,
            ratio.high,
        ),
        BenchRow(f"{name}.verified_read", median_interval([s["read_ms"] for s in samples]).median, "ms", n=first.n),
        BenchRow(f"{name}.decode_step", median_interval([s["step_ms"] for s in samples]).median, "ms", n=first.n),
    ]
