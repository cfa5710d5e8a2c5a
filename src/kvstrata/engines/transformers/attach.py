"""`attach`: from a model, a store and a budget to a `Memory`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from kvstrata.contract.budget import Persistent, SelectionBudget
from kvstrata.contract.identity import ModelIdentity, Namespace
from kvstrata.contract.layout import SegmentLayout
from kvstrata.cost.residency import required_slots
from kvstrata.engines.transformers.context import chunk_context, segment_layout, weights_identity
from kvstrata.engines.transformers.families import family_of
from kvstrata.engines.transformers.loading import LoadedModel
from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.parts import MemoryParts
from kvstrata.engines.transformers.selections import make_policy
from kvstrata.errors import BudgetError, ConfigurationError, Reason
from kvstrata.kernels.decode import DecodeAttention
from kvstrata.kernels.prefill import PrefillWorkspace, prefill_workspace_bytes
from kvstrata.methods.calibration import Calibration
from kvstrata.methods.interface import Method
from kvstrata.placement.gate import GateConfig
from kvstrata.store.cost_gate import CostGateConfig
from kvstrata.store.store import Store
from kvstrata.tiers.device import device_memory

__all__ = ["attach", "parse_bytes"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_AMOUNT = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*")


def attach(
    model: Any,
    store: Store | str | os.PathLike[str],
    *,
    budget: int | str | SelectionBudget | None = None,
    method: Method[Any] | None = None,
    mode: str | None = None,
    memory_budget: int | str | None = None,
    persistent: Persistent | None = None,
    min_history: int | None = None,
    dense_layers: Sequence[int] | None = None,
    gate: GateConfig | None = None,
    calibration: Calibration | None = None,
    host_budget: int | str | None = None,
    model_id: str | None = None,
    adapters: Sequence[str] | None = None,
    tenant: str = "default",
    salt: str = "",
    chunk_tokens: int = 256,
    prefill_chunk: int = 512,
    readers: int = 1,
    read_timeout_s: float = 30.0,
    wipe: bool = False,
    cost_gate: bool | CostGateConfig = False,
    threads: int | None = None,
    kernel_level: str | None = None,
    compile: bool = False,  # noqa: A002 - the name that PyTorch's users look for
    parts: MemoryParts | None = None,
) -> Memory:
    """Let `model` keep its K/V history in layered memory for the length of a `with` block. Exact, unless a method is
    named and `mode="approximate"`.

    - model: a Transformers model, or what `load_model` returned.
    - store: an open `Store`, or a directory that is opened (and made if it is not there) for the block.
    - budget: bytes of fast memory for arena, staging and workspace, as a number or like `"64MiB"`; `None` takes what
      the model's whole context needs, at most half of the device's memory.
    - method, mode: what chooses rows, with `mode="approximate"`; then `budget` is a number of rows such as `Rows(512)`,
      and `memory_budget` the bytes. persistent, min_history, dense_layers, gate, calibration: see `SelectionPolicy`.
    - host_budget: bytes of host memory for a tier between the device and the files, or `None` for none. What leaves the
      device is copied there first, and comes back without a read. It also keeps what cannot be written to files.
    - model_id: the caller's own name for the weights; without it a digest of the artefact, or of the live weights.
    - adapters: names of the adapters that are loaded, in order.
    - tenant, salt: nothing is shared across either.
    - chunk_tokens: tokens a chunk, a multiple of 64. prefill_chunk: most rows that a forward step computes at once.
    - readers: threads that read files. read_timeout_s: longest wait for a layer's segments, or for the writing of one
      chunk, in seconds.
    - wipe: zero every slot of memory before it is used for something else, and all of them at the end.
    - cost_gate: write a sealed chunk, and read a session back, only where that is cheaper than computing the rows
      again, by what engine and store have timed; `True` or a `CostGateConfig`. What has no room is written anyway.
    - threads: threads of the kernels (default: PyTorch's).
    - kernel_level: a native level, or `torch`; default: the best one that is built and runs here.
    - compile: run steps of one token a sequence by `torch.compile`, from the first such step on, which waits for the
      compiler. Where that fails, a `CompilationWarning` says so, and steps run as without it; see `memory.compilation`.
    - parts: parts of the memory that the caller brings: other backings, credits, a clock, injected faults.

    Nothing is computed or reserved for good before the block is entered. Errors: `UnsupportedError` for a model that
    cannot be served exactly, `BudgetError` with the bytes that would do, `StoreError`, `ConfigurationError`.
    """
    if isinstance(budget, SelectionBudget):
        rows, nbytes = budget, memory_budget
    else:
        rows, nbytes = None, budget if memory_budget is None else memory_budget
    if None not in (memory_budget, budget) and rows is None:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"budget={budget!r} and memory_budget={memory_budget!r} both say bytes",
            "pass one of them, or budget=Rows(...) with a method",
        )
    if method is not None and mode is None:
        raise ConfigurationError(
            Reason.APPROXIMATION_NOT_ALLOWED,
            f"method={method!r} leaves rows out, and mode is exact unless you say otherwise",
            'pass mode="approximate"',
        )
    chosen = {
        "method": method,
        "budget": rows,
        "persistent": persistent,
        "min_history": min_history,
        "dense_layers": dense_layers,
        "gate": gate,
        "calibration": calibration,
    }
    policy = make_policy(None, mode, chosen)
    loaded = model if isinstance(model, LoadedModel) else None
    module = loaded.model if loaded is not None else model
    if prefill_chunk < 1 or readers < 1:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"prefill_chunk={prefill_chunk} and readers={readers} must be at least 1"
        )
    rules = family_of(module).layer_rules
    layout = segment_layout(module, chunk_tokens)
    if model_id is not None:
        identity = ModelIdentity(f"id:{model_id}")
    else:
        identity = loaded.identity if loaded is not None else weights_identity(module)
    context = chunk_context(module, identity, Namespace(tenant, salt), chunk_tokens, adapters)
    limit = int(getattr(module.config, "max_position_embeddings", 0) or 4096)
    prefill_chunk = min(prefill_chunk, limit)
    windows = {rule.window for rule in rules}
    workspace = max(prefill_workspace_bytes(layout, prefill_chunk, window=window) for window in windows)
    stride = -(-layout.segment_bytes // 4096) * 4096
    capacity = device_memory(module.device)
    slots, total = _slots(layout, context.abi.layers, limit, prefill_chunk, stride, workspace, nbytes, capacity)
    host_slots = _host_slots(host_budget, stride)
    owns = not isinstance(store, Store)
    # The store comes last: what fails before it leaves no lock behind.
    kernel = DecodeAttention(layout, threads=threads, level=kernel_level)
    buffers = PrefillWorkspace(layout, prefill_chunk, device=module.device)
    opened = store if isinstance(store, Store) else Store(store)
    with contextlib.ExitStack() as undo:
        if owns:
            undo.callback(opened.close)
        memory = Memory(
            module,
            opened,
            context,
            layout,
            rules,
            budget=total,
            slots=slots,
            workspace=buffers,
            workspace_bytes=workspace,
            kernel=kernel,
            prefill_chunk=prefill_chunk,
            readers=readers,
            read_timeout_s=read_timeout_s,
            parts=parts or MemoryParts(),
            owns_store=owns,
            compiled=compile,
            host_slots=host_slots,
            wipe=wipe,
            cost_gate=CostGateConfig() if cost_gate is True else cost_gate or None,
            policy=policy,
        )
        undo.pop_all()
        return memory


def parse_bytes(value: int | str, field: str = "budget") -> int:
    """Bytes from a number or from text like `64MiB`, `1.5GB`. Errors: `ConfigurationError` naming field and value."""
    amount = value if isinstance(value, int) and not isinstance(value, bool) else 0
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if match is not None and match[2].lower() in _UNITS:
        amount = int(float(match[1]) * _UNITS[match[2].lower()])
    if amount < 1:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"{field}={value!r} is not a number of bytes from 1 to 10**18",
            'write it like 67108864 or "64MiB"',
        )
    return amount


def _host_slots(budget: int | str | None, stride: int) -> int:
    if budget is None:
        return 0
    total, memory = parse_bytes(budget, "host_budget"), device_memory(torch.device("cpu"))
    if not stride <= total <= memory:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"host_budget={budget!r} must be from {stride} bytes, one segment, to the {memory} bytes that the host has",
            "pass an amount in that range, or None for no host tier",
        )
    return total // stride


def _slots(
    layout: SegmentLayout,
    layers: int,
    limit: int,
    rows: int,
    stride: int,
    workspace: int,
    budget: int | str | None,
    capacity: int,
) -> tuple[int, int]:
    """(slots, budget in bytes). Without a budget: the whole context and the open tail, or half the device's memory."""
    if budget is None:
        tail = -(-rows // layout.chunk_tokens) + 1
        total = min((layout.segments(limit) + tail) * layers * stride + workspace, capacity // 2)
    else:
        total = parse_bytes(budget)
    if total > capacity:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"budget={budget!r} is more than the {capacity} bytes of memory that the device has",
            "pass a budget that leaves room for the model",
        )
    slots = (total - workspace) // stride
    least = required_slots(layers, 1, 1)
    if slots < least:
        need = least * stride + workspace
        raise BudgetError(
            Reason.BUDGET_TOO_SMALL,
            f"budget={total} bytes is less than the {need} that one open chunk in {layers} layers and the workspace "
            f"({workspace} bytes) take",
            f"pass budget={need} or more, or a smaller prefill_chunk or chunk_tokens",
            required_bytes=need,
        )
    return slots, total
