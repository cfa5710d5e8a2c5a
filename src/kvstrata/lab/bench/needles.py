"""Needles in haystacks for every method, beside exact attention and the yardsticks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvstrata.engines.transformers import LoadedModel, attach, load_model
from kvstrata.lab.bench.result import BenchReport, BenchRow, BenchTable, environment
from kvstrata.lab.methods.contenders import CONTENDERS, PERSISTENT, Contender, contenders
from kvstrata.lab.methods.needles import Haystack, Needle, NeedleScore, needle
from kvstrata.lab.methods.recording import default_layers, geometry_of, record
from kvstrata.lab.methods.statistics import mean_interval

__all__ = ["DEPTHS", "LENGTHS", "bench_needles"]

LENGTHS = (2048, 4096, 8000)
"""Tokens of a prompt; the last leaves room for the answer in a context of 8192."""

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the fact lies, from first to last."""

_DENSE = "exact"
_TUNING_STEPS = 1
_QUICK_LENGTH = 640

_Scores = dict[tuple[str, int], list[tuple[Needle, NeedleScore]]]


def bench_needles(
    source: str = "smollm2",
    dtype: str = "float32",
    tokens: int | None = None,
    seed: int = 0,
    quick: bool = False,
    rows: int = 512,
    names: Sequence[str] = tuple(CONTENDERS),
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """One fact in each of five depths and three lengths; methods at `rows` rows.

    tokens: one length instead of the three. seed: of facts and texts, of which every case has its own. quick: one short
    text, to see that it runs. There is no goal: a small model misses needles with exact attention too, so that the
    log-probability of the answer says more than the share that was found. Writes up to 400 MB of rows at a time where
    `tempfile` puts them. Errors: as `reading_task`.
    """
    lengths = [tokens] if tokens else [_QUICK_LENGTH] if quick else list(LENGTHS)
    depths = DEPTHS[2:3] if quick else DEPTHS
    size = 128 if quick else rows
    loaded = load_model(source, dtype=dtype)
    scores: _Scores = {}
    for length in lengths:
        contestants: list[Contender] = []
        for place, depth in enumerate(depths):
            task = needle(loaded.tokenizer, length, depth, seed=seed + place)
            progress(f"{length} tokens, depth {depth}: {task.answer}")
            contestants = contestants or _contestants(loaded, task, names, size)
            _one_case(loaded, task, contestants, scores, progress)
    settings = environment(
        torch.get_num_threads(),
        model=source,
        dtype=dtype,
        seed=seed,
        quick=quick,
        lengths=lengths,
        depths=list(depths),
        sinks=PERSISTENT.sinks,
        recent=PERSISTENT.recent,
        methods={name: CONTENDERS[name] for name in names},
    )
    return BenchReport("needles", settings, tuple(_rows(scores)), (_by_length(scores), _by_depth(scores)))


def _contestants(loaded: LoadedModel, task: Needle, names: Sequence[str], rows: int) -> list[Contender]:
    """Tuned where they need it, on the text of the first case: on its history alone, before any question."""
    layers = default_layers(geometry_of(loaded.model))
    recording = record(loaded.model, task.history, _TUNING_STEPS, layers)
    return contenders(names, [rows], recording)


def _one_case(
    loaded: LoadedModel,
    task: Needle,
    contestants: Sequence[Contender],
    scores: _Scores,
    progress: Callable[[str], None],
) -> None:
    with tempfile.TemporaryDirectory() as folder, attach(loaded, folder) as memory:
        haystack = Haystack(
            memory,
            loaded.tokenizer,
            task,
            "needle",
            progress=lambda done, total: progress(f"  read {done} of {total} tokens"),
        )
        for each in (None, *contestants):
            key = (_DENSE, 0) if each is None else (each.name, each.rows)
            found = haystack.score(each)
            progress(f"  {key[0]}: {found.reply!r}, log p {found.log_prob:.2f}")
            scores.setdefault(key, []).append((task, found))


def _rows(scores: _Scores) -> list[BenchRow]:
    out = []
    dense = float(np.mean([score.found for _, score in scores[_DENSE, 0]]))
    for (name, rows), cases in scores.items():
        share = float(np.mean([score.found for _, score in cases]))
        label = f"needles.{name}.{rows}.found" if rows else f"needles.{name}.found"
        out.append(BenchRow(label, share, "of the needles", dense, n=len(cases)))
    return out


def _by_length(scores: _Scores) -> BenchTable:
    lines: list[tuple[str | float | None, ...]] = []
    dense = [score.log_prob for _, score in scores[_DENSE, 0]]
    for (name, rows), cases in scores.items():
        lengths = sorted({task.tokens for task, _ in cases})
        for length in lengths:
            here = [(place, score) for place, (task, score) in enumerate(cases) if task.tokens == length]
            lost = mean_interval([dense[place] - score.log_prob for place, score in here])
            lines.append(
                (
                    name,
                    float(rows) if rows else None,
                    float(length),
                    float(np.mean([score.found for _, score in here])),
                    float(np.mean([score.exact for _, score in here])),
                    float(np.mean([score.log_prob for _, score in here])),
                    lost.median,
                    lost.low,
                    lost.high,
                    float(np.mean([score.chose for _, score in here])),
                    float(len(here)),
                )
            )
    columns = "found|exact|log p of answer, nats|lost to exact|low|high|share of layers that chose|n"
    return BenchTable("By length", ("method", "rows", "tokens", *columns.split("|")), tuple(lines))


def _by_depth(scores: _Scores) -> BenchTable:
    depths = sorted({task.depth for task, _ in scores[_DENSE, 0]})
    lines: list[tuple[str | float | None, ...]] = []
    for (name, rows), cases in scores.items():
        means = (float(np.mean([score.log_prob for task, score in cases if task.depth == depth])) for depth in depths)
        lines.append((name, float(rows) if rows else None, *means))
    return BenchTable("Log p of the answer by depth, nats", ("method", "rows", *map(str, depths)), tuple(lines))
