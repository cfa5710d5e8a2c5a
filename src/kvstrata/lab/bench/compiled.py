"""Decoding one token with and without `compile=True`, everything resident, in one process on one model."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvstrata.engines.transformers import Memory, Request, attach, load_model
from kvstrata.engines.transformers.compilation import CompilationState
from kvstrata.errors import Reason, UnsupportedError
from kvstrata.lab.bench.filled import fill
from kvstrata.lab.bench.result import BenchReport, BenchRow, environment, interleaved, median_interval

__all__ = ["LENGTHS", "bench_compile"]

LENGTHS = (64, 2048)
_GOAL = 1.0


def bench_compile(
    source: str = "smollm2",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    lengths: Sequence[int] = LENGTHS,
    rounds: int = 30,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Interleaved steps at every history length; ratios are compiled over eager, below 1 when compiled is faster.

    Goal: not slower, the median ratio at most 1. The seconds that compiling takes are a row of their own; they are
    fewer when PyTorch's cache on disk has what was compiled before. Errors: `UnsupportedError` when nothing could be
    compiled.
    """
    rows = []
    for dtype in dtypes:
        model = load_model(source, dtype=dtype).model
        with (
            tempfile.TemporaryDirectory() as folder,
            attach(model, folder, model_id="bench", compile=True) as memory,
            torch.inference_mode(),
        ):
            progress(f"{dtype}, compiling")
            rows.append(_compile(memory, dtype))
            for length in lengths:
                progress(f"{dtype}, {length} tokens")
                rows.append(_one_length(memory, dtype, length, rounds))
    return BenchReport("compile", environment(torch.get_num_threads(), model=source, seed=0), tuple(rows))


def _compile(memory: Memory, dtype: str) -> BenchRow:
    _step(memory, memory.request(), compiled=True)
    done = memory.compilation
    if done.state is not CompilationState.COMPILED:
        raise UnsupportedError(
            Reason.OPERATION_UNSUPPORTED,
            f"nothing could be compiled: {done.reason}",
            "install a C++ compiler and the headers of Python, or leave this benchmark out",
        )
    return BenchRow(f"compile.{dtype}.seconds", done.seconds, "s")


def _one_length(memory: Memory, dtype: str, length: int, rounds: int) -> BenchRow:
    samplers: dict[str, Callable[[], float]] = {
        name: partial(_step, memory, fill(memory, length), compiled=name == "compiled")
        for name in ("compiled", "eager")
    }
    samples = interleaved(samplers, rounds)
    ratio = median_interval([a / b for a, b in zip(samples["compiled"], samples["eager"], strict=True)])
    return BenchRow(
        f"compile.{dtype}.{length}.decode",
        statistics.median(samples["compiled"]),
        "ms/token",
        statistics.median(samples["eager"]),
        ratio.median,
        f"compiled / eager <= {_GOAL}",
        ratio.median <= _GOAL,
        rounds,
        ratio.low,
        ratio.high,
    )


def _step(memory: Memory, request: Request, *, compiled: bool) -> float:
    """Milliseconds of one step."""
    compiler = memory.wrapping.compiler
    assert compiler is not None
    with contextlib.nullcontext() if compiled else compiler.paused():
        start = time.perf_counter()
        memory.model(input_ids=torch.tensor([[11]]), past_key_values=request.cache, logits_to_keep=1)
        return (time.perf_counter() - start) * 1e3
