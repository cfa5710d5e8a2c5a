"""Stages of the demo that use kvstrata: the reading task, the cold run and the restored one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kvstrata.contract.receipts import RestoreReceipt, SaveReceipt
from kvstrata.engines.transformers import LoadedModel, Memory, Request, attach, load_model, parse_bytes
from kvstrata.engines.transformers.context import segment_layout
from kvstrata.engines.transformers.model_sources import prepare_model
from kvstrata.engines.transformers.precision import choose_dtype
from kvstrata.engines.transformers.stock import stock_cache, stock_forward
from kvstrata.errors import BudgetError, ConfigurationError, Reason
from kvstrata.lab.demo_job import CHUNKINGS, DemoJob, Reporter
from kvstrata.lab.demo_logits import LogitsFile, logprob_difference
from kvstrata.lab.machine import describe_machine
from kvstrata.lab.process_memory import peak_resident_bytes, release_free_memory, reset_peak, resident_bytes
from kvstrata.lab.prose import reading_task

__all__ = ["StepClock", "answer", "grown_bytes", "prepare", "read_cold", "restore", "warm_model"]

_WARM_ROWS = 512


class StepClock:
    """Handed to `generate` as its streamer: notes when each new token was there.

    times: seconds of `time.perf_counter`, one a token. sample: called after every token.
    """

    def __init__(self, report: Reporter, tokens: int, sample: Callable[[str], None] | None = None) -> None:
        self.times: list[float] = []
        self._report = report
        self._tokens = tokens
        self._sample = sample
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then every token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        if self._sample is not None:
            self._sample("answering")
        self._report("answering", len(self.times), self._tokens)

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def ms_per_token(self) -> float:
        """Median milliseconds between tokens; the first token is not a decode step."""
        return float(np.median(np.diff(self.times))) * 1e3


class _Trace:
    """Where the bytes were after every step."""

    def __init__(self, memory: Memory, request: Request) -> None:
        self._memory, self._request = memory, request
        self._start = time.perf_counter()
        self.points: list[dict[str, Any]] = []
        self("start")

    def __call__(self, phase: str) -> None:
        ledger = self._memory.ledger()
        self.points.append(
            {
                "seconds": time.perf_counter() - self._start,
                "phase": phase,
                "tokens": self._request.frontier,
                "logical_bytes": ledger.logical_bytes,
                "device_bytes": ledger.device_bytes,
                "file_bytes": ledger.file_bytes,
                "resident_bytes": resident_bytes(),
            }
        )


def prepare(job: DemoJob, report: Reporter) -> dict[str, Any]:
    """Find or convert the model, and write the reading task."""
    dtype = choose_dtype(job.dtype)
    if job.budget is not None:
        parse_bytes(job.budget)
    prepare_model(job.model, progress=lambda stage, done: report(stage, round(done * 100), 100))
    loaded = load_model(job.model, dtype=dtype.name)
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if limit is not None and job.tokens + job.new_tokens > limit:
        raise ConfigurationError(
            Reason.CONTEXT_EXCEEDED,
            f"a prompt of {job.tokens} tokens and an answer of {job.new_tokens} are more than the model's context "
            f"of {limit}",
            f"pass --tokens {max(1, limit - job.new_tokens)} or less, or a model with a longer context",
        )
    report("writing the task", 0, 0)
    task = reading_task(loaded.tokenizer, job.tokens, seed=job.seed)
    job.file("prompt.json").write_text(json.dumps(task.prompt_ids), encoding="utf-8")
    return {
        "dtype": dtype.name,
        "dtype_reason": dtype.reason,
        "question": task.question,
        "expected_answer": task.answer,
        "source": loaded.source,
        "identity": loaded.identity.artefact,
        "environment": describe_machine() | {"torch_threads": torch.get_num_threads()},
    }


def read_cold(job: DemoJob, report: Reporter) -> dict[str, Any]:
    """Read the prompt with a history larger than its memory, answer, save."""
    prompt = job.prompt()
    loaded = warm_model(job, prompt, report)
    before = resident_bytes()
    with _attached(loaded, job, len(prompt)) as memory:
        request = memory.request()
        trace = _Trace(memory, request)
        start = time.perf_counter()

        def reading(done: int, total: int) -> None:
            # What the C library keeps of a slice's activations is no part of the history.
            release_free_memory()
            trace("reading")
            report("reading", done, total)

        memory.prefill(prompt, request, progress=reading)
        clock = StepClock(report, job.new_tokens, trace)
        tokens = answer(loaded.model, prompt, clock, job, "cold", request.generate_kwargs())
        report("saving", 0, 0)
        saved = memory.save(job.session, request)
        trace("saved")
        grown, ledger, layout = grown_bytes(before), memory.ledger(), memory.layout
        return {
            "tokens": tokens,
            "answer": _text(loaded, tokens),
            "history_tokens": request.frontier,
            "history_bytes": ledger.logical_bytes,
            "device_budget_bytes": memory.budget,
            "chunk_tokens": layout.chunk_tokens,
            "prefill_chunk": memory.prefill_chunk,
            "kernel": memory.kernel.level,
            "first_token_s": clock.times[0] - start,
            "decode_ms_per_token": clock.ms_per_token,
            "rss_growth_bytes": grown,
            "save": _plain(saved),
            "ledger": ledger.to_json(),
            "trace": trace.points,
        }


def restore(stage: str, job: DemoJob, report: Reporter) -> dict[str, Any]:
    """In a fresh process: bring back what the process before saved, answer again, save again."""
    prompt, cold = job.prompt(), job.result("cold")
    sequence = job.result(job.saver(stage))["save"]["sequence"]
    loaded = warm_model(job, prompt, report)
    before = resident_bytes()
    with _attached(loaded, job, len(prompt), (cold["chunk_tokens"], cold["prefill_chunk"])) as memory:
        report("restoring", 0, 0)
        start = time.perf_counter()
        request, receipt = memory.restore(job.session, prompt, sequence=sequence)
        clock = StepClock(report, job.new_tokens)
        tokens = answer(loaded.model, prompt, clock, job, stage, request.generate_kwargs())
        report("saving", 0, 0)
        saved = memory.save(job.session, request)
        grown, ledger = grown_bytes(before), memory.ledger()
        return {
            "tokens": tokens,
            "first_token_s": clock.times[0] - start,
            "decode_ms_per_token": clock.ms_per_token,
            "rss_growth_bytes": grown,
            "max_logprob_difference": logprob_difference(job.logits(stage), job.logits("cold"), job.new_tokens),
            "restore": _plain(receipt),
            "save": _plain(saved),
            "ledger": ledger.to_json(),
        }


def warm_model(job: DemoJob, prompt: list[int], report: Reporter) -> LoadedModel:
    """The model, after one stock step: weights are paged in and the libraries have what they keep.

    The peak of resident memory starts again from there.
    """
    report("loading the model", 0, 0)
    dtype = job.result("prepare")["dtype"]
    loaded = load_model(job.model, dtype=dtype)
    # The answer has a fixed length, so that every run does the same steps; its text is cut at the end marker.
    loaded.model.generation_config.eos_token_id = None
    report("warming up", 0, 0)
    stock_forward(loaded.model, torch.tensor([prompt[:_WARM_ROWS]]), stock_cache(loaded.model))
    release_free_memory()
    reset_peak()
    return loaded


def grown_bytes(before: int | None) -> int | None:
    """Highest resident memory since `warm_model`, less what was resident then."""
    peak = peak_resident_bytes()
    return None if before is None or peak is None else peak - before


def answer(
    model: Any, prompt: list[int], clock: StepClock, job: DemoJob, stage: str, kwargs: dict[str, Any]
) -> list[int]:
    """Greedy tokens; their logits go to the stage's file."""
    out = model.generate(
        torch.tensor([prompt]),
        **kwargs,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=job.new_tokens,
        do_sample=False,
        logits_processor=[LogitsFile(job.logits(stage))],
        streamer=clock,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@contextmanager
def _attached(
    loaded: LoadedModel, job: DemoJob, prompt_tokens: int, chunking: tuple[int, int] | None = None
) -> Iterator[Memory]:
    """A memory with the job's budget, and the coarsest chunks that it can hold to the end."""
    choices = (chunking,) if chunking else CHUNKINGS
    for number, (chunk_tokens, prefill_chunk) in enumerate(choices, 1):
        try:
            memory = attach(
                loaded,
                job.store,
                budget=job.budget or _quarter(loaded, prompt_tokens + job.new_tokens - 1),
                salt=job.salt,
                chunk_tokens=chunk_tokens,
                prefill_chunk=prefill_chunk,
            )
            memory.require_fits(prompt_tokens + job.new_tokens)
        except BudgetError:
            if number == len(choices):
                raise
            continue
        with memory:
            yield memory
        return


def _quarter(loaded: LoadedModel, tokens: int) -> int:
    layout = segment_layout(loaded.model, CHUNKINGS[0][0])
    return tokens * layout.row_bytes * int(loaded.model.config.num_hidden_layers) // 4


def _text(loaded: LoadedModel, tokens: list[int]) -> str:
    end = loaded.tokenizer.eos_token_id
    kept = tokens[: tokens.index(end)] if end in tokens else tokens
    return str(loaded.tokenizer.decode(kept, skip_special_tokens=True)).strip()


def _plain(receipt: SaveReceipt | RestoreReceipt) -> dict[str, Any]:
    return asdict(receipt) | ({"hit": receipt.hit} if isinstance(receipt, RestoreReceipt) else {})
