"""Random sequences of calls on requests of several sequences, against a stock forward of each sequence alone."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach, budget_of
from matrix_runs import generate, model_of

from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.request import Request
from kvstrata.errors import BudgetError

TOLERANCE = 1e-4
WIDEST = 400
"""Columns from which on a batch is cropped instead of continued."""


class _Batch:
    """What the caller holds: the request, and an id and a mask value for each column so far of each sequence.

    held: rows from there on belong to beams and are never saved.
    """

    def __init__(self, request: Request, rows: int) -> None:
        self.request = request
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.mask: list[list[int]] = [[] for _ in range(rows)]
        self.held: list[float] = [math.inf] * rows

    @property
    def width(self) -> int:
        return len(self.ids[0])

    def tokens(self, row: int) -> list[int]:
        return [token for token, seen in zip(self.ids[row], self.mask[row], strict=True) if seen]

    def add(self, ids: list[list[int]], mask: list[list[int]]) -> None:
        for row, (new, seen) in enumerate(zip(ids, mask, strict=True)):
            self.ids[row] += new
            self.mask[row] += seen

    def cut(self, width: int) -> None:
        self.ids = [row[:width] for row in self.ids]
        self.mask = [row[:width] for row in self.mask]

    def take(self, indices: list[int], beams: bool) -> None:
        if beams:
            self.held = [min(held, len(self.tokens(row))) for row, held in enumerate(self.held)]
        self.ids = [list(self.ids[index]) for index in indices]
        self.mask = [list(self.mask[index]) for index in indices]
        self.held = [self.held[index] for index in indices]

    def require_same(self) -> None:
        assert self.request.width == self.width
        assert [row.token_ids for row in self.request.rows] == [self.tokens(i) for i in range(len(self.ids))]


class _Walk:
    """One random sequence of calls; `batches` are the open ones, `saved` what each snapshot must bring back."""

    def __init__(self, model: Any, store: Path, seed: int) -> None:
        self.model, self.store = model, store
        self.random = random.Random(seed)
        self.batches: list[_Batch] = []
        self.saved: list[tuple[int, list[int]]] = []
        self.compared = self.refused = 0

    def run(self, steps: int) -> None:
        layers = self.model.config.num_hidden_layers
        prefill = self.random.choice((7, CHUNK, 100))
        least = budget_of(self.model, layers + 1, prefill=prefill)
        some = budget_of(self.model, layers * self.random.randint(2, 12), prefill=prefill)
        budget = self.random.choices((None, some, least), (3, 4, 1))[0]
        with attach(self.model, self.store, budget=budget, prefill_chunk=prefill, model_id="walk") as memory:
            for _ in range(steps):
                self.step(memory)
                assert memory.ledger().peak_device_bytes <= memory.budget
            while self.batches:
                self.close(memory)
            assert len(memory.directory) == 0
            arena = memory.arena
        # What was being written is let go of when the block ends.
        assert arena.used_slots == 0

    def step(self, memory: Memory) -> None:
        calls = [self.start, self.forward, self.generate, self.crop, self.select, self.save, self.restore, self.damage]
        weights = (2, 5, 4, 2, 3, 2, 2, 1)
        call = self.random.choices([*calls, self.close], (*weights, 1))[0] if self.batches else self.start
        try:
            call(memory)
        except BudgetError:
            self.refused += 1
        for batch in self.batches:
            batch.require_same()

    def start(self, memory: Memory) -> None:
        batch = _Batch(memory.request(), self.random.randint(1, 4))
        self.batches.append(batch)
        self.extend(batch, self.random.randint(1, 3 * CHUNK))

    def forward(self, memory: Memory) -> None:
        batch = self.random.choice(self.batches)
        if batch.width < WIDEST:
            self.extend(batch, self.random.choice((1, 1, self.random.randint(2, 1 + CHUNK))))

    def extend(self, batch: _Batch, columns: int) -> None:
        """New columns with random padding; one slice after the other may be refused, which cuts the call short."""
        ids = [self.numbers(columns) for _ in batch.ids]
        mask = [self.hidden(columns, bool(batch.tokens(row))) for row in range(len(batch.ids))]
        whole = [[*old, *new] for old, new in zip(batch.mask, mask, strict=True)]
        batch.add(ids, mask)
        given = {} if all(all(row) for row in whole) and self.random.random() < 0.5 else {"attention_mask": whole}
        try:
            logits = self.model(
                torch.tensor(ids),
                past_key_values=batch.request.cache,
                **{name: torch.tensor(value) for name, value in given.items()},
            ).logits
        except BudgetError:
            self.settle(batch)
            raise
        for row, seen in enumerate(mask):
            self.compare(batch.tokens(row), logits[row, torch.tensor(seen).bool()])

    def generate(self, memory: Memory) -> None:
        batch = self.random.choice(self.batches)
        if batch.width >= WIDEST:
            return
        columns, steps = self.random.randint(1, 30), self.random.randint(1, 5)
        shown = [self.random.randint(1, columns) for _ in batch.ids]
        batch.add([self.numbers(columns) for _ in batch.ids], [[0] * (columns - n) + [1] * n for n in shown])
        inputs = torch.tensor(batch.ids), torch.tensor(batch.mask)
        end = self.next_token(batch.tokens(0), self.random.randint(0, 3)) if self.random.random() < 0.5 else None
        try:
            output = generate(
                self.model,
                inputs,
                memory.generate_kwargs(batch.request),
                steps,
                eos_token_id=end,
            )
        except BudgetError:
            # What was generated until then is known to nobody but the request.
            self.drop(batch)
            raise
        made = output.sequences[:, batch.width :].tolist()
        for row, new in enumerate(made):
            stop = new.index(end) if end in new else len(new)
            before = batch.tokens(row)
            rows = [step[row] for step in output.logits[: stop + 1]]
            self.compare([*before, *new[: len(rows) - 1]], torch.stack(rows))
        kept = [new[:-1] for new in made]
        batch.add(kept, [[int(end not in new[: column + 1]) for column in range(len(new))] for new in kept])

    def crop(self, memory: Memory) -> None:
        batch = self.random.choice(self.batches)
        keep = self.random.randint(0, batch.width)
        if keep == 0:
            batch.request.cache.crop(-batch.width)
        else:
            batch.request.cache.crop(self.random.choice((keep, keep - batch.width)))
        batch.cut(keep)

    def select(self, memory: Memory) -> None:
        """Rows are picked, repeated or reordered; where the copies do not fit, the request is closed."""
        batch, count = self.random.choice(self.batches), 0
        count = len(batch.ids)
        picked = [self.random.randrange(count) for _ in range(self.random.randint(1, 4))]
        repeats = self.random.randint(1, max(1, 5 // count))
        cache, kind = batch.request.cache, self.random.randrange(3)
        try:
            if kind == 0:
                cache.batch_select_indices(torch.tensor(picked))
            elif kind == 1:
                picked = [index for index in range(count) for _ in range(repeats)]
                cache.batch_repeat_interleave(repeats)
            else:
                picked = [self.random.randrange(count) for _ in range(count)]
                cache.reorder_cache(torch.tensor(picked))
        except BudgetError:
            assert batch.request.closed
            self.drop(batch)
            raise
        batch.take(picked, beams=kind == 2)

    def save(self, memory: Memory) -> None:
        batch = self.random.choice(self.batches)
        row = self.random.randrange(len(batch.ids))
        kept = batch.tokens(row)[: int(min(WIDEST * 2, batch.held[row]))]
        if kept:
            receipt = memory.save("walk", batch.request, row=row)
            assert receipt.frontier == len(kept)
            self.saved.append((receipt.sequence, kept))

    def restore(self, memory: Memory) -> None:
        if not self.saved:
            return
        sequence, stored = self.random.choice(self.saved)
        ids = stored[: self.random.randint(0, len(stored))] + self.numbers(self.random.randint(1, 40))
        request, receipt = memory.restore("walk", ids, sequence=sequence)
        batch = _Batch(request, 1)
        self.batches.append(batch)
        batch.add([ids[: receipt.restored_tokens]], [[1] * receipt.restored_tokens])
        batch.require_same()
        rest = ids[receipt.restored_tokens :]
        batch.add([rest], [[1] * len(rest)])
        try:
            logits = self.model(torch.tensor([rest]), past_key_values=request.cache).logits
        except BudgetError:
            self.settle(batch)
            raise
        self.compare(ids, logits[0])

    def damage(self, memory: Memory) -> None:
        files = sorted((self.store / "chunks").rglob("*.kv"))
        if not files:
            return
        path, raw = self.random.choice(files), bytearray(self.random.choice(files).read_bytes())
        raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
        path.unlink()
        if self.random.random() < 0.8:
            path.write_bytes(raw[: self.random.choice((len(raw), len(raw) // 2))])

    def close(self, memory: Memory) -> None:
        self.drop(self.random.choice(self.batches))

    def drop(self, batch: _Batch) -> None:
        batch.request.close()
        self.batches.remove(batch)

    def settle(self, batch: _Batch) -> None:
        """A call was cut short between two slices: all rows are as wide as the narrowest."""
        width = batch.request.width
        batch.request.cache.crop(-1)
        batch.cut(max(0, width - 1))

    def compare(self, ids: list[int], logits: torch.Tensor) -> None:
        """`logits` are those of the last of `ids`."""
        if not len(logits):
            return
        with torch.no_grad():
            expected = self.model(torch.tensor([ids]), use_cache=False).logits[0, -len(logits) :]
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        self.compared += len(logits)

    def next_token(self, ids: list[int], steps: int) -> int:
        """The token that greedy decoding of `ids` adds after `steps` others."""
        ids = list(ids)
        for _ in range(steps + 1):
            with torch.no_grad():
                ids.append(int(self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[-1]

    def hidden(self, columns: int, may_hide_all: bool) -> list[int]:
        """Mask values of new columns: none hidden, padding on the left or the right, holes, or nothing shown."""
        shown = self.random.randint(1, columns)
        kinds = [
            [1] * columns,
            [0] * (columns - shown) + [1] * shown,
            [1] * shown + [0] * (columns - shown),
            [self.random.randint(0, 1) for _ in range(columns)],
            [0] * columns,
        ]
        mask = self.random.choices(kinds, (3, 4, 1, 1, 1))[0]
        return mask if any(mask) or may_hide_all else [1] * columns

    def numbers(self, count: int) -> list[int]:
        return [self.random.randrange(2, 199) for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("seed", range(2))
def test_any_sequence_of_calls_returns_the_stock_logits(tmp_path: Path, family: str, seed: int) -> None:
    walk = _Walk(model_of(family), tmp_path / "store", seed)
    for _ in range(2):
        walk.run(steps=10)
    assert walk.compared > 50
