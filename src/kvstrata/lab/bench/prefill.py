"""Reading a prompt in chunks: kvstrata against both stock paths with the same chunk."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvstrata.engines.transformers import attach, load_model
from kvstrata.engines.transformers.stock import STOCK_ATTENTION, stock_attention, stock_cache, stock_forward
from kvstrata.lab.bench.result import BenchReport, BenchRow, environment, interleaved, median_interval

__all__ = ["bench_prefill"]

_CHUNK = 512


def bench_prefill(
    source: str = "smollm2",
    dtypes: Sequence[str] = ("float32",),
    tokens: int = 6000,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Interleaved whole prefills; the ratio is stock time over kvstrata time. Goal: at least 1.

    bfloat16 is left out by default: without native bf16 instructions a stock prefill of 6000 tokens takes minutes.
    """
    rows = []
    for dtype in dtypes:
        model = load_model(source, dtype=dtype).model
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=generator)
        progress(f"{dtype}, {tokens} tokens, {rounds} rounds")
        rows.append(_one(model, dtype, ids, rounds))
    return BenchReport("prefill", environment(torch.get_num_threads(), model=source, seed=0, chunk=_CHUNK), tuple(rows))


def _one(model: Any, dtype: str, ids: torch.Tensor, rounds: int) -> BenchRow:
    tokens = ids.shape[1]

    def ours() -> float:
        with (
            tempfile.TemporaryDirectory() as folder,
            attach(model, folder, model_id="bench", prefill_chunk=_CHUNK) as memory,
        ):
            start = time.perf_counter()
            model(input_ids=ids, **memory.generate_kwargs(), logits_to_keep=1)
            return time.perf_counter() - start

    def stock(name: str) -> float:
        cache = stock_cache(model)
        with stock_attention(model, name):
            start = time.perf_counter()
            for part in ids.split(_CHUNK, dim=1):
                stock_forward(model, part, cache)
            return time.perf_counter() - start

    samplers: dict[str, Callable[[], float]] = {
        "kvstrata": ours,
        **{name: partial(stock, name) for name in STOCK_ATTENTION},
    }
    with torch.inference_mode():
        model(input_ids=ids[:, :_CHUNK], logits_to_keep=1, use_cache=False)
        samples = interleaved(samplers, rounds, warm_up=0)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    best = min(STOCK_ATTENTION, key=lambda name: medians[name])
    ratio = median_interval([b / a for a, b in zip(samples["kvstrata"], samples[best], strict=True)])
    return BenchRow(
        f"prefill.{dtype}.{tokens}.speedup_over_{best}",
        medians["kvstrata"],
        "s",
        medians[best],
        ratio.median,
        ">= 1.0",
        ratio.median >= 1.0,
        rounds,
        ratio.low,
        ratio.high,
    )
