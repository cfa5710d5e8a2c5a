"""Every method at the same numbers of rows: what it leaves out of a real model's attention, and what choosing costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import torch

from kvstrata.engines.transformers import LoadedModel, attach, load_model
from kvstrata.engines.transformers.families.view import TransformersView
from kvstrata.lab.bench.methods_tables import cost_table, divergence_table, goal_rows, support_table
from kvstrata.lab.bench.result import BenchReport, environment
from kvstrata.lab.methods.contenders import CONTENDERS, PERSISTENT, contenders
from kvstrata.lab.methods.divergence import Divergence, LiveText
from kvstrata.lab.methods.measuring import measure
from kvstrata.lab.methods.recording import Recording, default_layers, geometry_of, record
from kvstrata.lab.prose import prose

__all__ = ["SIZES", "bench_methods"]

SIZES = (128, 256, 512)
"""Rows of each owner, persistent ones included."""

_STEPS, _LIVE_STEPS = 64, 256
_LAYERS = 6


def bench_methods(
    source: str = "smollm2",
    dtype: str = "float32",
    tokens: int = 4096,
    seed: int = 0,
    quick: bool = False,
    names: Sequence[str] = tuple(CONTENDERS),
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Omitted mass, errors, bytes and times on recorded attention, then divergence in live requests.

    tokens: history, in tokens; 64 steps follow it on the recording and 256 in live requests, over the text that really
    goes on. quick: a short history, few steps and one size, to see that it runs; its figures say nothing. Goals are at
    256 rows: at most 3.1 times the omitted mass of group-shared exact top-k for Quest with pages of 16, and less than
    sinks and a window for the methods that look at queries. Holds recorded layers and indexes, about 1 GB for the
    default settings. Errors: `ConfigurationError` for names that are not in `CONTENDERS`, or more tokens than there is
    prose.
    """
    sizes: Sequence[int] = SIZES[:1] if quick else SIZES
    steps, live_steps, layers = (8, 8, 2) if quick else (_STEPS, _LIVE_STEPS, _LAYERS)
    tokens = min(tokens, 512) if quick else tokens
    loaded = load_model(source, dtype=dtype)
    text = prose(tokens + max(steps, live_steps) + 1, loaded.tokenizer)
    progress(f"recording {tokens} tokens and {steps} steps")
    recording = record(
        loaded.model,
        text[: tokens + steps],
        steps,
        default_layers(geometry_of(loaded.model), layers),
        source=source,
        progress=lambda done, total: progress(f"read {done} of {total} tokens"),
    )
    contestants = contenders(names, sizes, recording)
    measured, dense = measure(recording, contestants, TransformersView(loaded.model), seed=seed, progress=progress)
    diverged = _diverge(loaded, recording, text[: tokens + live_steps + 1], names, sizes, progress)
    settings = environment(
        torch.get_num_threads(),
        model=source,
        dtype=dtype,
        seed=seed,
        quick=quick,
        history=tokens,
        steps=steps,
        live_steps=live_steps,
        layers=list(recording.layers),
        sinks=PERSISTENT.sinks,
        recent=PERSISTENT.recent,
        methods={f"{each.name}.{each.rows}": repr(each.method) for each in contestants},
    )
    tables = (support_table(measured), cost_table(measured, dense), divergence_table(diverged))
    return BenchReport("methods", settings, tuple(goal_rows(measured)), tables)


def _diverge(
    loaded: LoadedModel,
    recording: Recording,
    token_ids: Sequence[int],
    names: Sequence[str],
    sizes: Sequence[int],
    progress: Callable[[str], None],
) -> list[tuple[str, int, Divergence]]:
    steps = len(token_ids) - recording.history - 1
    found = []
    with tempfile.TemporaryDirectory() as folder, attach(loaded, folder) as memory:
        progress(f"live: reading {recording.history} tokens, then {steps} exact steps")
        text = LiveText(
            memory, token_ids, steps, progress=lambda done, total: progress(f"live: read {done} of {total} tokens")
        )
        for each in contenders(names, sizes, recording):
            progress(f"live: {each.name} at {each.rows} rows, {steps} steps")
            found.append((each.name, each.rows, text.diverge(each.method, each.budget)))
    return found
