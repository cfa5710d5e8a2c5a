"""Requests under one policy read their own rows: the same tokens, computed over other parts, are other rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_cases import CHUNK, attach

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.methods.quest import Quest

KEEP = Persistent(sinks=2, recent=9)


def tokens(count: int) -> list[int]:
    return torch.randint(1, 190, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def run(model: Any, request: Any, ids: list[int], length: int) -> torch.Tensor:
    """The last logits: the first `length` tokens are a prompt, the others come one by one."""
    with torch.no_grad():
        model(torch.tensor([ids[:length]]), **request.generate_kwargs())
        steps = [model(torch.tensor([[token]]), **request.generate_kwargs()).logits[0, -1] for token in ids[length:]]
    return torch.stack(steps)


def choosing(model: Any, store: Path) -> Any:
    method = Quest(page_size=8, dense_layers=0)
    return attach(model, store, method=method, budget=Rows(24), persistent=KEEP, min_history=CHUNK, mode="approximate")


def test_answers_do_not_depend_on_other_requests(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), tokens(2 * CHUNK + 30)
    with choosing(model, tmp_path / "alone") as memory:
        expected = run(model, memory.request(), ids, CHUNK + 10)
    with choosing(model, tmp_path / "beside") as memory:
        # Its second chunk has the same tokens, of which most were read exactly.
        other = memory.request()
        run(model, other, ids[: 2 * CHUNK + 2], 2 * CHUNK - 2)
        request = memory.request()
        assert torch.equal(run(model, request, ids, CHUNK + 10), expected)
        assert request.history.chunks[0] is other.history.chunks[0], "exact rows are shared"
        assert request.history.chunks[1].digest != other.history.chunks[1].digest


def test_sessions_come_back_with_their_own_rows(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), tokens(2 * CHUNK + 30)
    with choosing(model, tmp_path) as memory:
        for name, length in (("first", 2 * CHUNK - 2), ("second", CHUNK + 10)):
            request = memory.request()
            run(model, request, ids[:-1], length)
            rows = [bytes(memory.arena.backing.readable(g.slot)) for g in request.history.chunks[1].grants]
            memory.save(name, request)
            request.close()
    with choosing(model, tmp_path) as memory:
        request, receipt = memory.restore("second", ids)
        assert receipt.reason is None
        assert receipt.restored_tokens == len(ids) - 1
        with torch.no_grad():
            model(torch.tensor([ids[-1:]]), **request.generate_kwargs())
        assert [bytes(memory.arena.backing.readable(g.slot)) for g in request.history.chunks[1].grants] == rows
