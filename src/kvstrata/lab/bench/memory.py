"""The budget and the background: peak bytes, growth of the process, and what publishing costs beside the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from kvstrata.errors import KvstrataError, Reason
from kvstrata.lab.bench.result import BenchReport, BenchRow, environment

__all__ = ["bench_memory"]

_ALLOWANCE = 64 * 2**20


def bench_memory(
    source: str = "smollm2",
    dtype: str = "float32",
    tokens: int = 6144,
    share: int = 4,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """One fresh process reads `tokens` tokens under a budget of 1/`share` of its history, decodes and saves.

    Goals: peak device bytes at most the budget; growth of the resident set, from after model load and warm-up, at most
    the budget + 64 MiB; processor time of the publishing thread, checksums and writing included, at most 5 % of the
    process's.
    """
    progress(f"{dtype}: {tokens} tokens under 1/{share} of their history")
    command = [sys.executable, "-m", "kvstrata.lab.bench.memory_child", source, dtype, str(tokens), str(share)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KvstrataError(Reason.INVALID_ARGUMENT, f"the measuring process failed:\n{done.stderr.strip()[-2000:]}")
    got: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    budget, name = got["budget_bytes"], f"memory.{dtype}.{tokens}"
    allowed = budget + _ALLOWANCE
    rows = (
        BenchRow(
            f"{name}.peak_device",
            got["peak_device_bytes"],
            "bytes",
            budget,
            got["peak_device_bytes"] / budget,
            "<= budget",
            got["peak_device_bytes"] <= budget,
        ),
        BenchRow(
            f"{name}.rss_growth",
            got["rss_growth_bytes"],
            "bytes",
            allowed,
            got["rss_growth_bytes"] / allowed,
            "<= budget + 64 MiB",
            got["rss_growth_bytes"] <= allowed,
        ),
        BenchRow(
            f"{name}.publish_cpu",
            got["publish_cpu_s"],
            "s",
            got["process_cpu_s"],
            got["publish_overhead"],
            "<= 0.05, checksum and write included",
            got["publish_overhead"] <= 0.05,
        ),
        BenchRow(f"{name}.decode", got["decode_ms"], "ms/token", n=got["decode_n"]),
    )
    return BenchReport("memory", environment(torch.get_num_threads(), model=source, budget=budget), rows)
