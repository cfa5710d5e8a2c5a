"""From which length of history on choosing rows is faster than reading them all, by where the history lies."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.cost.residency import required_slots
from kvstrata.engines.transformers import Memory, Request, attach, load_model
from kvstrata.lab.bench.result import BenchReport, BenchRow, BenchTable, environment, median_interval
from kvstrata.lab.prose import prose
from kvstrata.methods.interface import Method
from kvstrata.methods.registry import parse_method
from kvstrata.store import Store
from kvstrata.tiers.throttled import Link, ThrottledTier

__all__ = ["LENGTHS", "bench_break_even"]

LENGTHS = (1024, 2048, 4096, 7680)
_CHUNK = 64
_LINK_BYTES_PER_S = 200e6
_LINK_LATENCY_S = 0.0005
_STEPS = 3
"""Steps of a block; the first of them takes the memory over from the other request, and is not counted."""


def bench_break_even(
    source: str = "smollm2",
    dtype: str = "float32",
    lengths: Sequence[int] = LENGTHS,
    rounds: int = 7,
    method: str = "quest:page_size=64,sharing=softmax_sum",
    rows: int = 256,
    quick: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Steps of one token, choosing over exact, in turns of a few steps over the same prose, chunks of 64 tokens.

    Three places: everything on the device; history in files, read by chunk; files behind a link of 200 MB/s and 0.5 ms,
    which stands for a slow tier. There the device holds what the exact plan needs of one layer. The ratio is
    choosing over exact, below 1 where choosing is faster; the break-even is the first length with an upper bound below
    1. No goal: it depends on the model and the machine.
    """
    lengths, rounds = ((640,), 2) if quick else (tuple(lengths), rounds)
    loaded = load_model(source, dtype=dtype)
    chosen = parse_method(method)
    ids = prose(max(lengths) + 2 * _STEPS * (rounds + 2), loaded.tokenizer)
    found: list[BenchRow] = []
    table: list[tuple[str | float | None, ...]] = []
    for place in ("device", "files", "link"):
        first: int | None = None
        for length in lengths:
            progress(f"{place}, {length} tokens")
            row, moved = _one(loaded, place, ids, length, rounds, chosen, rows)
            found.append(row)
            first = length if first is None and row.high is not None and row.high < 1 else first
            table.append((place, length, row.value, row.baseline, row.ratio, *moved))
        found.append(
            BenchRow(f"break_even.{place}", float(first or 0), "tokens; 0: at none of these lengths", n=rounds)
        )
    columns = ("history in", "tokens", "choosing ms", "exact ms", "ratio", "choosing MB read", "exact MB read")
    title = f"break-even of {method} with {rows} rows, {dtype}"
    env = environment(torch.get_num_threads(), model=source, method=method, rows=rows, dtype=dtype, seed=0)
    return BenchReport("break-even", env, tuple(found), (BenchTable(title, columns, tuple(table)),))


def _one(
    loaded: Any, place: str, ids: Sequence[int], length: int, rounds: int, method: Method[Any], rows: int
) -> tuple[BenchRow, tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        link = Link(_LINK_BYTES_PER_S, _LINK_LATENCY_S)
        with Store(folder, wrap_tier=None if place != "link" else lambda tier: ThrottledTier(tier, link)) as store:
            options: dict[str, Any] = {"chunk_tokens": _CHUNK, "model_id": "bench"}
            with attach(loaded, store, **options) as memory:
                memory.save("text", memory.prefill(ids[: length + 1]))
                least = required_slots(memory.context.abi.layers, length // _CHUNK + 1, 2)
                budget = memory.budget_of(least + 4)
            if place != "device":
                options["budget"] = budget
            with attach(loaded, store, **options) as memory:
                return _compare(memory, place, ids, length, rounds, method, rows)


def _compare(
    memory: Memory, place: str, ids: Sequence[int], length: int, rounds: int, method: Method[Any], rows: int
) -> tuple[BenchRow, tuple[float, float]]:
    choice: dict[str, Any] = {
        "method": method,
        "budget": Rows(rows),
        "persistent": Persistent(),
        "min_history": 64,
        "dense_layers": (),
    }
    exact, _ = memory.restore("text", ids[: length + 1])
    choosing, _ = memory.restore("text", ids[: length + 1], mode="approximate", **choice)
    samples: dict[str, list[float]] = {"exact": [], "choosing": []}
    moved: dict[str, list[float]] = {"exact": [], "choosing": []}
    for turn in range(rounds + 1):
        for name, request in (("exact", exact), ("choosing", choosing)):
            times, nbytes = _block(memory, request, ids)
            if turn:  # the first builds the index
                samples[name].append(times)
                moved[name].append(nbytes / 1e6)
    ratio = median_interval([a / b for a, b in zip(samples["choosing"], samples["exact"], strict=True)])
    row = BenchRow(
        f"break_even.{place}.{length}",
        statistics.median(samples["choosing"]),
        "ms/token",
        statistics.median(samples["exact"]),
        ratio.median,
        n=ratio.n,
        low=ratio.low,
        high=ratio.high,
        evidence="synthetic" if place == "link" else "measured",
    )
    return row, (statistics.median(moved["choosing"]), statistics.median(moved["exact"]))


def _block(memory: Memory, request: Request, ids: Sequence[int]) -> tuple[float, float]:
    times, moved = [], 0
    for step in range(_STEPS):
        token = torch.tensor([[ids[request.frontier]]])
        start = time.perf_counter()
        with torch.inference_mode():
            memory.model(input_ids=token, **request.generate_kwargs(), logits_to_keep=1)
        if step:
            times.append((time.perf_counter() - start) * 1e3)
            moved = 0 if request.last_step is None else request.last_step.moved_bytes
    return statistics.median(times), moved
