"""The engine's side of methods: which frame a sequence gets, and the residual stream that methods look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.contract.method import QueryVariant
from kvstrata.engines.transformers.families.registry import family_of
from kvstrata.engines.transformers.families.view import TransformersView
from kvstrata.engines.transformers.row import Row
from kvstrata.errors import ConfigurationError, Reason, UnsupportedError
from kvstrata.kernels.block_table import BlockTable
from kvstrata.methods.interface import Geometry, StepRows
from kvstrata.placement.gate import Gate, GateConfig
from kvstrata.placement.gated import StepGate
from kvstrata.placement.layer_ahead import LayerAhead
from kvstrata.placement.live_shadow import LiveShadow
from kvstrata.placement.on_demand import OnDemand
from kvstrata.placement.policy import SelectionPolicy
from kvstrata.placement.row_access import RowAccess
from kvstrata.placement.selecting import Selecting
from kvstrata.placement.support_attention import SupportAttention
from kvstrata.store.history import History

if TYPE_CHECKING:
    from kvstrata.engines.transformers.inputs import Span
    from kvstrata.engines.transformers.memory import Memory

__all__ = ["Selections", "attend_span", "begin_choosing", "make_policy", "reads_beyond"]


class Selections:
    """Frames for the sequences of one attached model; bases are made once for each method."""

    def __init__(self, memory: Memory, memory_tensor: Callable[[], torch.Tensor], stride: int) -> None:
        self._memory = memory
        self.family = family_of(memory.model)
        self.geometry = Geometry(
            self.family.layers,
            self.family.query_heads,
            self.family.kv_heads,
            self.family.head_dim,
            self.family.scale,
            tuple(rule.window for rule in memory.rules),
            any(rule.sinks for rule in memory.rules),
        )
        self._attention = SupportAttention(memory.kernel, self.geometry, memory_tensor, stride)
        self._bases: dict[str, object] = {}
        self._made: dict[str, Gate] = {}
        self._view: TransformersView | None = None
        self._hooks: list[Any] = []

    def require(self, policy: SelectionPolicy) -> SelectionPolicy:
        """`policy`, if this model can be served so. Errors: `UnsupportedError`, `ConfigurationError`."""
        policy.require(self.geometry)
        if policy.calibration is not None:
            policy.calibration.require(policy.method, self._memory.context)
        if self._memory.wrapping.compiler is not None:
            raise UnsupportedError(
                Reason.OPERATION_UNSUPPORTED,
                "compile=True traces attention as one operator, which chooses no rows",
                "attach without compile, or make an exact request",
            )
        return policy

    def frame(self, policy: SelectionPolicy, history: History, shadow: LiveShadow | None = None) -> Selecting:
        """A frame for one sequence under `policy`. The first one of a method makes its basis, which may take time."""
        method = self.require(policy).method
        if self._view is None:
            self._view = TransformersView(self._memory.model, self.family)
        if method.digest not in self._bases:
            self._bases[method.digest] = method.prepare(self._view, self.geometry)
        if method.contract.needs_hidden and not self._hooks:
            self._watch()
        frame = Selecting(
            policy,
            self.geometry,
            self._attention,
            history,
            self._memory.clock,
            basis=self._bases[method.digest],
            view=self._view,
            gates=None if policy.gate is None else self._gates(policy, policy.gate),
        )
        frame.shadow = shadow
        return frame

    def row(self, history: History, policy: SelectionPolicy | None, shadow: LiveShadow | None) -> Row:
        """The sequence of `history`, with a frame where there is a policy."""
        return Row(history, None if policy is None else self.frame(policy, history, shadow))

    def gate(self, policy: SelectionPolicy) -> Gate | None:
        """The gate of all requests under `policy`, with its counts; `None` where there is none yet."""
        return self._made.get(policy.digest)

    def _gates(self, policy: SelectionPolicy, config: GateConfig) -> Callable[[RowAccess], StepGate]:
        memory = self._memory
        gate = self._made.get(policy.digest)
        if gate is None:
            gate = Gate(config, policy.calibration, memory.clock, policy.method.contract.answer)
            self._made[policy.digest] = gate
        return partial(StepGate, gate, memory.store.rates, memory.log.prefills)

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._bases.clear()

    def _watch(self) -> None:
        for number, layer in enumerate(self.family.layer_modules(self._memory.model)):
            hook = _Tap(self._memory, number)
            self._hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))


class _Tap:
    """Hands the residual stream that enters a layer to the request in its step."""

    def __init__(self, memory: Memory, layer: int) -> None:
        self._memory = memory
        self._layer = layer

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._memory.note_hidden(self._layer, hidden)


def begin_choosing(plan: LayerAhead, rows: Sequence[Row], counts: Sequence[int]) -> None:
    """Plan a step of `counts` rows of each sequence. Layers in which all of them choose read nothing ahead."""
    if not isinstance(plan, OnDemand):
        plan.begin_step(*counts)
        return
    chosen: frozenset[int] | None = None
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if row.frame is not None and count:
            layers = row.frame.begin_step(count)
            row.frame.bind(plan, place)
            chosen = layers if chosen is None else chosen & layers
    plan.begin_choosing(chosen or (), *counts)


def attend_span(
    memory: Memory,
    span: Span,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: BlockTable,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One layer of one sequence; shapes as for `PagedAttention`."""
    frame = span.row.frame
    if frame is None:
        return memory.attention(query, key, value, table, span.start, scale, window, sinks)
    rows = StepRows(span.start, query[0], key[0], value[0])
    frame.ahead(layer)
    if layer in frame.chosen:
        memory.kernel.append(key, value, table, span.start)
        output = frame.attend(layer, rows, table, sinks)
        if output is not None:
            return output.unsqueeze(0)
    exact = memory.attention(query, key, value, table, span.start, scale, window, sinks)
    frame.after_exact(layer, rows)
    return exact


def make_policy(current: SelectionPolicy | None, mode: str | None, changes: dict[str, Any]) -> SelectionPolicy | None:
    """The policy of one request: `current` with `changes`, or `None` for exact.

    mode: "exact", "approximate", or `None` for approximate where there is a policy. Errors: `ConfigurationError`.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    fields = [field.name for field in dataclasses.fields(SelectionPolicy)]
    if unknown := sorted(given.keys() - set(fields)):
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"a request takes no {', '.join(unknown)}", f"there are: {', '.join(fields)}"
        )
    if isinstance(given.get("dense_layers"), list | range):
        given["dense_layers"] = tuple(given["dense_layers"])
    if mode not in (None, "exact", "approximate"):
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"mode={mode!r}", 'pass mode="exact" or mode="approximate"')
    if mode == "exact":
        if given:
            raise ConfigurationError(
                Reason.APPROXIMATION_NOT_ALLOWED,
                f"mode='exact' takes no {', '.join(sorted(given))}: an exact answer leaves no rows out",
                'pass mode="approximate", or leave them away',
            )
        return None
    if current is not None:
        return dataclasses.replace(current, **given)
    if not given and mode is None:
        return None
    missing = [name for name in ("method", "budget") if name not in given]
    if missing:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"an approximate request needs a {' and a '.join(missing)}",
            "for example method=Quest(page_size=16), budget=Rows(512)",
        )
    return SelectionPolicy(**given)


def reads_beyond(policies: Sequence[SelectionPolicy | None]) -> bool:
    """Whether all of these read histories longer than the model's trained window, by turning far rows nearer."""
    return all(each is not None and each.method.contract.variant is QueryVariant.REPOSITIONED for each in policies)
