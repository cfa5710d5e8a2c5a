"""Stages of the demo that measure the stock Transformers cache beside kvstrata."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from kvstrata.engines.transformers import Memory, attach
from kvstrata.engines.transformers.stock import (
    STOCK_ATTENTION,
    filled_stock_cache,
    stock_attention,
    stock_cache,
    stock_forward,
    stock_prefill,
)
from kvstrata.lab.demo_job import DemoJob, Reporter
from kvstrata.lab.demo_layered import StepClock, answer, grown_bytes, warm_model
from kvstrata.lab.demo_logits import logprob_difference
from kvstrata.lab.process_memory import release_free_memory, reset_peak, resident_bytes

__all__ = ["read_stock", "time_decoding"]

_WARM_STEPS = 3
_PROBE_ROWS = 128


def read_stock(job: DemoJob, report: Reporter) -> dict[str, Any]:
    """The same reading and answering with the stock cache, in the same slices, with its faster attention function."""
    prompt, cold = job.prompt(), job.result("cold")
    loaded = warm_model(job, prompt, report)
    chunk = cold["prefill_chunk"]
    report("probing", 0, 0)
    probe = {name: _probe(loaded.model, name, len(prompt) // 2, min(chunk, _PROBE_ROWS)) for name in STOCK_ATTENTION}
    chosen = min(probe, key=lambda name: probe[name])
    with stock_attention(loaded.model, chosen):
        release_free_memory()
        reset_peak()
        before = resident_bytes()
        cache = stock_cache(loaded.model)
        start = time.perf_counter()
        stock_prefill(loaded.model, prompt, cache, chunk, lambda done, total: report("reading", done, total))
        clock = StepClock(report, job.new_tokens)
        tokens = answer(loaded.model, prompt, clock, job, "stock", {"past_key_values": cache, "use_cache": True})
        return {
            "tokens": tokens,
            "attention": chosen,
            "probe_s": probe,
            "first_token_s": clock.times[0] - start,
            "decode_ms_per_token": clock.ms_per_token,
            "rss_growth_bytes": grown_bytes(before),
            "max_logprob_difference": logprob_difference(job.logits("stock"), job.logits("cold"), job.new_tokens),
        }


def time_decoding(job: DemoJob, report: Reporter) -> dict[str, Any]:
    """Decode steps at the full history with everything in memory: kvstrata and both stock attention functions.

    Rounds are interleaved and their order rotates, so that a busy moment of the machine falls on all alike.
    """
    prompt, cold = job.prompt(), job.result("cold")
    loaded = warm_model(job, prompt, report)
    model = loaded.model
    token = torch.tensor([[cold["tokens"][-1]]])
    with attach(
        loaded, job.store, salt=job.salt, chunk_tokens=cold["chunk_tokens"], prefill_chunk=cold["prefill_chunk"]
    ) as memory:
        report("restoring", 0, 0)
        request, _ = memory.restore(job.session)
        stock_forward(model, token, request.cache)
        contenders = {"kvstrata": request.cache} | {name: filled_stock_cache(request) for name in STOCK_ATTENTION}
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)

        def step(name: str) -> float:
            with nullcontext() if name == "kvstrata" else _beside(memory, name):
                start = time.perf_counter()
                stock_forward(model, token, contenders[name])
                return (time.perf_counter() - start) * 1e3

        _repeat(step, names, _WARM_STEPS)
        for turn in range(job.rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name, times in _repeat(step, order, job.steps).items():
                samples[name] += times
            report("decoding", turn + 1, job.rounds)
        return {
            "median_ms": {name: float(np.median(times)) for name, times in samples.items()},
            "quartiles_ms": {name: np.percentile(times, (25, 75)).tolist() for name, times in samples.items()},
            "samples": job.rounds * job.steps,
            "history_tokens": request.frontier,
            "moved_bytes": request.last_step.moved_bytes if request.last_step else None,
        }


@contextmanager
def _beside(memory: Memory, name: str) -> Iterator[None]:
    """Stock calls with attention function `name` while the model is attached to `memory`."""
    with memory.stock(), stock_attention(memory.model, name):
        yield


def _repeat(step: Callable[[str], float], names: list[str], steps: int) -> dict[str, list[float]]:
    return {name: [step(name) for _ in range(steps)] for name in names}


def _probe(model: Any, name: str, past: int, rows: int) -> float:
    """Seconds of one slice of `rows` rows over `past` rows of noise."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = stock_cache(model)
    noise = torch.randn(1, heads, past, head_dim, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(noise, noise, layer)
    with stock_attention(model, name):
        start = time.perf_counter()
        stock_forward(model, torch.ones(1, rows, dtype=torch.long), cache)
        return time.perf_counter() - start
