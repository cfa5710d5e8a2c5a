"""Decoding one token, everything resident: kvstrata against the faster of the stock `sdpa` and `eager` paths."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvstrata.engines.transformers import attach, load_model
from kvstrata.engines.transformers.stock import STOCK_ATTENTION, filled_stock_cache, stock_attention, stock_forward
from kvstrata.lab.bench.filled import fill
from kvstrata.lab.bench.result import BenchReport, BenchRow, environment, interleaved, median_interval

__all__ = ["LENGTHS", "bench_decode"]

LENGTHS = (64, 256, 1024, 2048, 4096, 6144)
_GOALS = {"float32": 1.2, "bfloat16": 1.6}


def bench_decode(
    source: str = "smollm2",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    lengths: Sequence[int] = LENGTHS,
    rounds: int = 30,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Interleaved steps at every history length; ratios are stock over kvstrata, above 1 when kvstrata is faster.

    Goals: at 6144 tokens 1.6x in bf16 and 1.2x in fp32; at no length slower (upper 95 % bound of kvstrata over stock
    at most 1.05).
    """
    rows = []
    for dtype in dtypes:
        model = load_model(source, dtype=dtype).model
        for length in lengths:
            progress(f"{dtype}, {length} tokens")
            rows += _one_length(model, dtype, length, rounds)
    return BenchReport("decode", environment(torch.get_num_threads(), model=source, seed=0), tuple(rows))


def _one_length(model: object, dtype: str, length: int, rounds: int) -> list[BenchRow]:
    with (
        tempfile.TemporaryDirectory() as folder,
        attach(model, folder, model_id="bench") as memory,
        torch.inference_mode(),
    ):
        request = fill(memory, length)
        caches = {name: filled_stock_cache(request) for name in STOCK_ATTENTION}
        token = torch.tensor([[11]])

        def ours() -> float:
            start = time.perf_counter()
            memory.model(input_ids=token, past_key_values=request.cache, logits_to_keep=1)
            return (time.perf_counter() - start) * 1e3

        def stock(name: str) -> float:
            with memory.stock(), stock_attention(memory.model, name):
                start = time.perf_counter()
                stock_forward(memory.model, token, caches[name])
                return (time.perf_counter() - start) * 1e3

        samplers: dict[str, Callable[[], float]] = {
            "kvstrata": ours,
            **{name: partial(stock, name) for name in STOCK_ATTENTION},
        }
        samples = interleaved(samplers, rounds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    best = min(STOCK_ATTENTION, key=lambda name: medians[name])
    slower = median_interval([a / b for a, b in zip(samples["kvstrata"], samples[best], strict=True)])
    out = [
        BenchRow(
            f"decode.{dtype}.{length}.never_slower",
            medians["kvstrata"],
            "ms/token",
            medians[best],
            slower.median,
            "kvstrata / stock <= 1.05 at the upper 95 % bound",
            slower.high <= 1.05,
            rounds,
            slower.low,
            slower.high,
        )
    ]
    if length == 6144:
        goal = _GOALS[dtype]
        faster = median_interval([b / a for a, b in zip(samples["kvstrata"], samples[best], strict=True)])
        out.append(
            BenchRow(
                f"decode.{dtype}.{length}.speedup_over_{best}",
                medians["kvstrata"],
                "ms/token",
                medians[best],
                faster.median,
                f">= {goal}",
                faster.median >= goal,
                rounds,
                faster.low,
                faster.high,
            )
        )
    return out
