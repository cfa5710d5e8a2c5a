"""Every contender over one recording, step by step in turn: what it left out, and what choosing cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.lab.methods.attention import RecordedAttention
from kvstrata.lab.methods.contenders import PERSISTENT, Contender
from kvstrata.lab.methods.recording import LayerRecording, Recording
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.interface import Index, Method, StepRows
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.placement.expansion import Support, expand
from kvstrata.placement.shadow import DenseReference
from kvstrata.ports import ModelView

__all__ = ["PAGE_TOKENS", "Measured", "measure"]

PAGE_TOKENS = 64
"""Rows of one head that lie together in a stored chunk: the least that a read from below brings."""

_OBSERVED_SLICE = 512
_WARM_UP = 2


@dataclass
class Measured:
    """What one contender did. figures: name to values [layers, steps], means over heads where they have any:

    the measures of `ShadowMeasures`; head_rows: distinct rows that each K/V head has to read; read_bytes: those rows'
    K and V and what the method read to choose them; page_bytes: the same in whole pages of `PAGE_TOKENS` rows;
    chosen_bytes: K and V of the distinct rows; append, select, gather, attend: seconds.
    build: seconds of each layer. index_bytes: of each layer, per token and K/V head.
    """

    contender: Contender
    figures: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    build: list[float] = field(default_factory=list)
    index_bytes: list[float] = field(default_factory=list)

    def by_step(self, name: str) -> NDArray[np.float64]:
        """One value a step: the mean over layers."""
        means: NDArray[np.float64] = self.figures[name].mean(0)
        return means

    def median(self, name: str) -> float:
        """Over layers and steps."""
        return float(np.median(self.figures[name]))

    def mean(self, name: str) -> float:
        """Over layers and steps."""
        return float(np.mean(self.figures[name]))


def measure(
    recording: Recording,
    contestants: Sequence[Contender],
    view: ModelView | None,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Measured], NDArray[np.float64]]:
    """All `contestants` over all layers and steps, and the seconds [layers, steps] of dense attention by the same
    reference.

    view: the model that was recorded, for methods that look at it. Within a step contenders take turns, and the order
    rotates. One thread or many, as PyTorch is set.
    """
    found = [Measured(each) for each in contestants]
    bases = {
        each.method.digest: each.method.prepare(view, recording.geometry)
        for each in {one.method.digest: one for one in contestants}.values()
    }
    dense = np.zeros((len(recording.layers), recording.steps))
    for place, (layer, recorded) in enumerate(recording.layers.items()):
        progress(f"layer {layer}: building {len(found)} indexes")
        trials = [
            _Trial(recording, layer, recorded, each, view, bases[each.contender.method.digest], seed, clock)
            for each in found
        ]
        progress(f"layer {layer}: {recording.steps} steps")
        attention = RecordedAttention(recording.geometry, recorded.keys, recorded.values)
        for step in range(recording.steps):
            dense[place, step] = _one_step(recording, recorded, trials, attention, step, clock)
        for trial in trials:
            trial.close()
    return found, dense


def _one_step(
    recording: Recording,
    recorded: LayerRecording,
    trials: Sequence[_Trial],
    attention: RecordedAttention,
    step: int,
    clock: Callable[[], float],
) -> float:
    position = recording.history + step
    rows = recorded.rows(position, position + 1)
    reference = DenseReference.of(
        rows.queries, recorded.keys[:, : rows.stop], recorded.values[:, : rows.stop], recording.geometry.scale
    )
    for _ in range(_WARM_UP if step == 0 else 0):
        attention.dense(rows)
    start = clock()
    attention.dense(rows)
    spent = clock() - start
    for turn in range(len(trials)):
        trials[(turn + step) % len(trials)].step(step, rows, reference, attention)
    return spent


class _Trial:
    def __init__(
        self,
        recording: Recording,
        layer: int,
        recorded: LayerRecording,
        measured: Measured,
        view: ModelView | None,
        basis: object,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self._recording, self._layer, self._recorded, self._measured = recording, layer, recorded, measured
        self._view, self._basis, self._seed, self._clock = view, basis, seed, clock
        self._method: Method[Any] = measured.contender.method
        self._steps: list[dict[str, float]] = []
        start = clock()
        self._index: Index = self._build()
        measured.build.append(clock() - start)

    def step(self, step: int, rows: StepRows, reference: DenseReference, attention: RecordedAttention) -> None:
        recorded, clock, geometry = self._recorded, self._clock, self._recording.geometry
        previous = recorded.previous[step : step + 1]
        hidden = {max(0, self._layer - 1): previous, self._layer: recorded.hidden[rows.start : rows.stop]}
        ctx = self._context(rows.stop, hidden)
        times = [clock()]
        selection = self._method.speculate(ctx, self._layer, self._index, previous) if self._layer else None
        times.append(clock())
        self._index = self._method.append(ctx, self._layer, self._index, rows)
        times.append(clock())
        if selection is None:
            selection = self._method.select(ctx, self._layer, self._index, rows)
        support = expand(self._method, self._index, selection, geometry, ctx.persistent, rows.stop)
        times.append(clock())
        gathered = attention.gather(support)
        times.append(clock())
        output, state = attention.attend(rows, selection, support, gathered)
        times.append(clock())
        if type(self._method).feedback is not Method.feedback:
            mass = attention.unit_mass(rows, selection, support, gathered, state)
            self._method.feedback(ctx, self._layer, self._index, selection, mass)
        speculated, append, select, gather, attend = (b - a for a, b in itertools.pairwise(times))
        seconds = {"append": append, "select": speculated + select, "gather": gather, "attend": attend}
        measures = reference.measure(support, output).means()
        self._steps.append(measures | self._bytes(support, selection, ctx.read_bytes) | seconds)

    def close(self) -> None:
        measured, geometry = self._measured, self._recording.geometry
        for name in self._steps[0]:
            values = np.array([[each[name] for each in self._steps]])
            before = measured.figures.get(name)
            measured.figures[name] = values if before is None else np.concatenate([before, values])
        measured.index_bytes.append(self._index.nbytes / (self._index.frontier * geometry.kv_heads))

    def _build(self) -> Index:
        history, index = self._recording.history, None
        if type(self._method).observe is not Method.observe:
            for start in range(0, history, _OBSERVED_SLICE):
                rows = self._recorded.rows(start, min(history, start + _OBSERVED_SLICE))
                ctx = self._context(rows.stop, {self._layer: self._recorded.hidden[start : rows.stop]})
                index = self._method.observe(ctx, self._layer, index, rows)
        built: Index = self._method.build(self._context(history, {}), self._layer, index)
        built.frontier = history
        return built

    def _context(self, visible: int, hidden: dict[int, Tensor]) -> InMemoryContext:
        contender = self._measured.contender
        return InMemoryContext(
            self._recording.geometry,
            {self._layer: (self._recorded.keys, self._recorded.values)},
            contender.budget,
            self._method.persistent(PERSISTENT, contender.budget.limit(visible)),
            visible,
            basis=self._basis,
            view=self._view,
            hidden=hidden,
            seed=self._seed,
        )

    def _bytes(self, support: Support, selection: Selection, own: int) -> dict[str, float]:
        geometry = self._recording.geometry
        row = 2 * geometry.head_dim * self._recorded.keys.element_size()
        lists = support.rows
        if lists.shape[0] < geometry.kv_heads:
            lists = lists.expand(geometry.kv_heads, -1)
        lists = lists.reshape(geometry.kv_heads, -1)
        pages = -(-support.visible // PAGE_TOKENS)
        # Entries that are no row fall behind the last page.
        wanted = torch.zeros(geometry.kv_heads, (pages + 1) * PAGE_TOKENS, dtype=torch.bool)
        wanted.scatter_(1, lists.masked_fill(lists == NO_UNIT, pages * PAGE_TOKENS), True)
        wanted = wanted[:, : pages * PAGE_TOKENS]
        distinct = int(wanted.sum())
        touched = int(wanted.view(geometry.kv_heads, pages, PAGE_TOKENS).any(-1).sum())
        return {
            "head_rows": distinct / geometry.kv_heads,
            "candidates": float(selection.candidates),
            "chosen_bytes": float(distinct * row),
            "read_bytes": float(own + distinct * row),
            "page_bytes": float(own + touched * PAGE_TOKENS * row),
        }
