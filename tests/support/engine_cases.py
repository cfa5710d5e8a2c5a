"""Runs of a tiny model that the tests of the Transformers engine compare: stock, in fp64, and through a memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import kvstrata
from kvstrata.engines.transformers.context import segment_layout
from kvstrata.engines.transformers.families import family_of
from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.versions import cache_keyword
from kvstrata.errors import BudgetError
from kvstrata.kernels.prefill import prefill_workspace_bytes

CHUNK = 64
PREFILL = 128
QUIET: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    """Token ids [1, tokens]; a longer prompt of the same seed begins with the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (1, 4096), generator=generator)[:, :tokens]


def attach(model: Any, store: Any, **options: Any) -> Memory:
    """`kvstrata.attach` with small chunks."""
    return kvstrata.attach(model, store, **({"chunk_tokens": CHUNK, "prefill_chunk": PREFILL} | options))


def budget_of(model: Any, slots: int, chunk: int = CHUNK, prefill: int = PREFILL) -> int:
    """A budget of exactly `slots` slots."""
    layout = segment_layout(model, chunk)
    stride = -(-layout.segment_bytes // 4096) * 4096
    windows = {rule.window for rule in family_of(model).layer_rules}
    return slots * stride + max(prefill_workspace_bytes(layout, prefill, window=window) for window in windows)


def least_budget(model: Any, tokens: int, store: Path, **options: Any) -> int:
    """The budget that the refusal of a prompt of `tokens` tokens names."""
    least = model.config.num_hidden_layers + 1
    with attach(model, store, budget=budget_of(model, least), **options) as memory:
        try:
            memory.prefill([1] * tokens)
        except BudgetError as error:
            return error.required_bytes
    return budget_of(model, least)


def generate(model: Any, ids: torch.Tensor, tokens: int, cache: dict[str, Any], **options: Any) -> Any:
    """Greedy decoding with logits, unless `options` say otherwise. No token counts as padding."""
    mask = {"attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **cache, max_new_tokens=tokens, **(QUIET | mask | options))


def stock(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> Any:
    """The same with Transformers' own cache."""
    return generate(model, ids, tokens, {cache_keyword(model): DynamicCache(config=model.config)}, **options)


def logits(output: Any) -> torch.Tensor:
    """[steps, vocabulary] of a `generate` output."""
    return torch.cat(output.logits)


def double_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[tokens, vocabulary] of one stock forward in fp64."""
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        return twin(ids, use_cache=False).logits[0]


def rms(values: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension, fp64."""
    return values.double().square().mean(-1).sqrt()


def chunk_files(store: Path) -> list[Path]:
    """Published chunk files of a store."""
    return sorted((store / "chunks").glob("*/*.kv"))


def rows_of(memory: Memory, request: Any, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V [kv_heads, tokens, head_dim] of every layer, as the kernels would read them; all must be in memory."""
    layout, result = memory.layout, []
    for table in request.plan.tables[0].layers:
        pair = [torch.empty(layout.kv_heads, tokens, layout.head_dim, dtype=memory.model.dtype) for _ in range(2)]
        memory.kernel.gather(table, 0, tokens, *pair)
        result.append((pair[0], pair[1]))
    return result


def require_within_budget(memory: Memory) -> None:
    """No more slots than the budget pays for, and a ledger that agrees with itself."""
    ledger = memory.ledger()
    device, file = ledger.traffic["device"], ledger.traffic["file"]
    assert ledger.peak_device_bytes <= memory.budget
    assert ledger.device_bytes <= ledger.peak_device_bytes
    assert memory.arena.peak_slots <= memory.arena.slots
    lower = file.moved_bytes + ledger.traffic["host"].moved_bytes
    assert device.resident_hit_bytes + lower == device.requested_bytes
    assert file.requested_bytes == file.moved_bytes


@contextmanager
def patched_layer(model: Any, layer: int, before: Callable[[], None]) -> Iterator[None]:
    """Inside the block `before` runs ahead of the forward of one decoder layer."""
    handle = model.model.layers[layer].register_forward_pre_hook(lambda *_: before())
    try:
        yield
    finally:
        handle.remove()
