"""Random sequences of calls on several requests under random budgets, against the stock model, row by row."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach, budget_of

from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.request import Request
from kvstrata.errors import BudgetError

TOLERANCE = 1e-4


class _Walk:
    """One random sequence of calls; `requests` are the open ones, `saved` what each snapshot must bring back."""

    def __init__(self, model: Any, store: Path, seed: int) -> None:
        self.model, self.store = model, store
        self.random = random.Random(seed)
        self.requests: list[Request] = []
        self.saved: list[tuple[int, list[int]]] = []
        self.compared = self.refused = 0

    def run(self, steps: int) -> None:
        layers = self.model.config.num_hidden_layers
        prefill = self.random.choice((7, CHUNK, 100))
        slots = layers + self.random.randint(8, 20)
        budget = self.random.choice((None, budget_of(self.model, slots, prefill=prefill)))
        self.requests = []
        with attach(self.model, self.store, budget=budget, prefill_chunk=prefill) as memory:
            for _ in range(steps):
                calls = [self.start, self.forward, self.generate, self.save, self.restore, self.damage, self.close]
                call = self.random.choices(calls, (3, 4, 2, 2, 2, 2, 1))[0] if self.requests else self.start
                try:
                    call(memory)
                except BudgetError:
                    self.refused += 1
                assert memory.ledger().peak_device_bytes <= memory.budget

    def start(self, memory: Memory) -> None:
        shared = self.random.choice(self.requests).token_ids if self.requests else []
        ids = shared[: self.random.randint(0, len(shared))] + self.tokens(1, 3 * CHUNK)
        self.requests.append(memory.request())
        memory.prefill(ids, self.requests[-1])
        assert self.requests[-1].token_ids == ids[:-1]

    def forward(self, memory: Memory) -> None:
        self.extend(self.random.choice(self.requests), self.tokens(1, 1 + CHUNK))

    def generate(self, memory: Memory) -> None:
        request = self.random.choice(self.requests)
        ids = request.token_ids + self.tokens(1, 20)
        output = self.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **memory.generate_kwargs(request),
        )
        self.compare(output.sequences[0, :-1].tolist(), torch.cat(output.logits))

    def save(self, memory: Memory) -> None:
        request = self.random.choice(self.requests)
        if request.frontier:
            self.saved.append((memory.save("walk", request).sequence, request.token_ids))

    def restore(self, memory: Memory) -> None:
        if not self.saved:
            return
        sequence, stored = self.random.choice(self.saved)
        ids = stored[: self.random.randint(0, len(stored))] + self.tokens(1, 40)
        request, receipt = memory.restore("walk", ids, sequence=sequence)
        self.requests.append(request)
        assert request.token_ids == ids[: receipt.restored_tokens]
        self.extend(request, ids[request.frontier :])

    def damage(self, memory: Memory) -> None:
        files = sorted((self.store / "chunks").rglob("*.kv"))
        if not files:
            return
        # A bit is flipped, the end is cut off, the file is gone, or it holds another chunk.
        path, raw = self.random.choice(files), bytearray(self.random.choice(files).read_bytes())
        raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
        path.unlink()
        if self.random.random() < 0.8:
            path.write_bytes(raw[: self.random.choice((len(raw), len(raw) // 2))])

    def close(self, memory: Memory) -> None:
        self.requests.pop(self.random.randrange(len(self.requests))).close()

    def extend(self, request: Request, tokens: list[int]) -> None:
        ids = request.token_ids + tokens
        output = self.model(torch.tensor([tokens]), past_key_values=request.cache)
        assert request.token_ids == ids
        self.compare(ids, output.logits[0])

    def compare(self, ids: list[int], logits: torch.Tensor) -> None:
        """`logits` are those of the last of `ids`."""
        with torch.no_grad():
            expected = self.model(torch.tensor([ids]), use_cache=False).logits[0, -len(logits) :]
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        self.compared += len(logits)

    def tokens(self, least: int, most: int) -> list[int]:
        return [self.random.randrange(1, 256) for _ in range(self.random.randint(least, most))]


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_calls_returns_the_stock_logits(
    tiny_llama: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    walk = _Walk(tiny_llama(layers=1 + seed % 3), tmp_path / "store", seed)
    for _ in range(2):
        walk.run(steps=10)
    assert walk.compared > 50
    assert walk.refused < 15
