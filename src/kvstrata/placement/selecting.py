"""The frame that calls methods: from a step's queries to the rows that enter attention, for one sequence.

    append -> select (or what was predicted a layer ahead) -> expand, drop duplicates, check -> bring in -> attend

A layer attends to everything while the history is short, where the policy says so, and whenever a fallback asks for it.
"""

from __future__ import annotations

import contextlib
import copy
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from kvstrata.contract.selection_receipts import LayerOutcome, SelectionReceipt, StageTimes
from kvstrata.cost.prepublication import Phase
from kvstrata.kernels.block_table import BlockTable
from kvstrata.methods.interface import Geometry, Index, Method, StepRows
from kvstrata.methods.selection import Selection
from kvstrata.placement.expansion import Support, expand
from kvstrata.placement.gated import StepGate, cap_outcome
from kvstrata.placement.live_shadow import LiveShadow
from kvstrata.placement.method_context import FrameContext
from kvstrata.placement.on_demand import OnDemand
from kvstrata.placement.policy import SelectionPolicy
from kvstrata.placement.row_access import RowAccess
from kvstrata.placement.selection_log import SelectionLog, count_rows, greatest_estimate, stages_of
from kvstrata.placement.support_attention import ChosenRows, SupportAttention
from kvstrata.ports import Clock, ModelView
from kvstrata.store.history import History

__all__ = ["Selecting"]


def _new_run() -> str:
    return secrets.token_hex(8)


class Selecting:
    """Selections of one history. Used by one thread: begin_step, then for every layer in order `ahead`, and `attend`
    or `after_exact`; then end_step, or abort_step.

    basis: what `Method.prepare` has made for the model. gates: makes what decides about every selection; without it,
    each is accepted. shadow: compares answers with dense ones, or `None`. runs: names that nobody else has.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        geometry: Geometry,
        attention: SupportAttention,
        history: History,
        clock: Clock,
        basis: object = None,
        view: ModelView | None = None,
        gates: Callable[[RowAccess], StepGate] | None = None,
        runs: Callable[[], str] = _new_run,
    ) -> None:
        self.policy = policy
        self.geometry = geometry
        self.history = history
        self.method: Method[Any] = policy.method
        self.shadow: LiveShadow | None = None
        self._attention = attention
        self._clock = clock
        self._dense = policy.dense(geometry)
        self._site = policy.site or self.method.contract.site
        self._indexes: list[Index | None] = [None] * geometry.layers
        self._built = [False] * geometry.layers
        self._observed = [0] * geometry.layers
        self._unsettled = set[int]()
        self._predicted: dict[int, tuple[Selection, float]] = {}
        self._outcomes: list[LayerOutcome | None] = []
        self._gates = gates
        self._runs = runs
        self._computes_again = False
        self._attach(basis, view)

    def begin_step(self, rows: int) -> frozenset[int]:
        """The layers that choose in a step of `rows` rows; what was taken back since the last one is forgotten."""
        start = self.history.frontier
        cut = self.history.cut_at
        self._rewind(start if cut is None else min(cut, start))
        self.history.cut_at = None
        self.context.begin_step(start, rows)
        self._log.begin()
        self._predicted = {}
        if self._gate is not None:
            self._gate.begin_step()
        self._outcomes = [self._reads_all(layer, start, rows) for layer in range(self.geometry.layers)]
        self._access.chosen = frozenset(layer for layer, outcome in enumerate(self._outcomes) if outcome is None)
        return self.chosen

    @property
    def chosen(self) -> frozenset[int]:
        """Layers that choose in this step."""
        return self._access.chosen

    @contextlib.contextmanager
    def interrupted(self, *, exactly: bool) -> Iterator[None]:
        """Steps in the block compute known rows again; after it, the step goes on that they interrupt.

        exactly: they leave no rows out.
        """
        self._computes_again = exactly
        try:
            with contextlib.nullcontext() if self._gate is None else self._gate.set_aside():
                yield
        finally:
            self._computes_again = False

    def bind(self, plan: OnDemand, place: int) -> None:
        """The plan of the step, and the place of this history in it."""
        self._access.bind(plan, place)

    def note_hidden(self, layer: int, hidden: Tensor) -> None:
        """The residual stream [rows, hidden_size] of this sequence that enters `layer`."""
        self.context.note_hidden(layer, hidden)

    def ahead(self, layer: int) -> None:
        """Before `layer` attends: let the method choose for the layer after it, and begin to bring that in."""
        coming = layer + 1
        index = self._indexes[coming] if coming < self.geometry.layers else None
        if coming not in self.chosen or index is None or not self.context.has_hidden(layer):
            return
        start = self._clock()
        self.context.enter(coming)
        selection = self.method.speculate(self.context, coming, index, self.context.hidden(layer))
        if selection is not None:
            support = self._expand(index, selection)
            wanted, _ = self._access.chunks_of(coming, support)
            self._access.fetch(coming, wanted)
            self._predicted[coming] = selection, self._clock() - start

    def attend(self, layer: int, rows: StepRows, table: BlockTable, sinks: Tensor | None = None) -> Tensor | None:
        """Attention [rows, query_heads, head_dim] of the step's rows over what is chosen, in their dtype.

        The rows are in `table` already. sinks: learned sink logits [query_heads]. Blocks until the rows are there.
        `None` when a fallback asks for exact attention; every row is there then. Errors: `RetrievalError` where the
        policy refuses, and for a selection that does not hold; those of reading.
        """
        times = [self._clock()]
        self.context.enter(layer)
        index = self._indexes[layer]
        assert index is not None
        with self._changing(layer):
            index = self._indexes[layer] = self.method.append(self.context, layer, index, rows)
        times.append(self._clock())
        selection, speculated = self._predicted.pop(layer, (None, 0.0))
        if selection is None:
            selection = self.method.select(self.context, layer, index, rows)
        selection, outcome = self._decided(layer, index, rows, selection)
        support = self._expand(index, selection)
        times.append(self._clock())
        access, near = self._access, dict[int, Tensor]()
        missing = access.missing(layer)
        output, near_rows, parts = None, 0, list[ChosenRows]()
        try:
            if outcome.exact:
                access.arrive_all(layer)
                times.append(self._clock())
            else:
                wanted, near = access.chunks_of(layer, support)
                access.arrive(layer, wanted)
                times.append(self._clock())
                parts = self._gather(layer, table, support, near)
                times.append(self._clock())
                output = self._compute(layer, rows, table, selection, support, index, parts, sinks)
                near_rows = count_rows(self._attention.rows(support), access.chunk_tokens, near)
        finally:
            access.give_back()
        times.append(self._clock())
        shadow = None
        if output is not None and self.shadow is not None and self.shadow.wants(layer, rows.start):
            access.arrive_all(layer, charged=False)
            dense = self._attention.read(table, 0, support.visible)
            shadow = self.shadow.compare(
                self.method,
                index,
                self.context,
                layer,
                rows,
                dense,
                sinks,
                selection,
                support,
                output,
                parts,
                access.rows_outside(missing, support.visible),
            )
        self._outcomes[layer] = outcome
        self._log.chosen(
            layer,
            outcome,
            index,
            selection,
            support,
            not_ready=count_rows(support.rows, access.chunk_tokens, missing - near.keys()),
            not_resident=access.chunk_tokens * len(missing),
            near_rows=near_rows,
            times=stages_of(times, speculated),
            estimate=greatest_estimate(selection),
            shadow=shadow,
        )
        return output

    def after_exact(self, layer: int, rows: StepRows) -> None:
        """`layer` has attended to everything: show the method, and let its index grow or be built."""
        outcome = self._outcomes[layer]
        if outcome is None or outcome in (LayerOutcome.CAP, LayerOutcome.GATE):
            return
        start = self._clock()
        self.context.enter(layer)
        index = self._indexes[layer]
        times = StageTimes()
        if outcome is not LayerOutcome.DENSE:
            if self._built[layer] and index is not None and index.frontier == rows.start:
                with self._changing(layer):
                    index = self.method.append(self.context, layer, index, rows)
                times = StageTimes(append=self._clock() - start)
            else:
                with self._changing(layer):
                    index = self.method.observe(self.context, layer, index, rows)
                if self._observed[layer] == rows.start:
                    # A method that gives its evidence up has seen nothing.
                    self._observed[layer] = 0 if index is None else rows.stop
                if outcome is LayerOutcome.BUILDING:
                    # It may take over what the evidence is in.
                    with self._changing(layer):
                        index = self.method.build(self.context, layer, index)
                    index.frontier = rows.stop
                    self._built[layer] = True
                times = StageTimes(build=self._clock() - start)
            self._indexes[layer] = index
        self._log.exact(layer, outcome, index, rows.stop, times)

    def end_step(self) -> SelectionReceipt:
        """The step's receipt. Rows that it computed have another lineage from now on, if it left any out."""
        receipt = self._log.receipt()
        if receipt.chose and self.history.approximate_from is None:
            self.history.turn_approximate(self.policy.lineage_of(self._runs()))
        if self._gate is not None:
            self._gate.end_step()
        return receipt

    def abort_step(self, *, again: bool = False) -> None:
        """The step ended early. What the indexes learned in it is forgotten when the next one begins.

        again: it is tried again at once, under the deadline that it has.
        """
        self._access.give_back()
        self._access.chosen = frozenset()
        self._predicted.clear()
        if self._gate is not None and not again:
            self._gate.end_step()

    def fork(self, history: History) -> Selecting:
        """The same selections for `history`, a copy of this one's."""
        other = copy.copy(self)
        other.history = history
        other._indexes = copy.deepcopy(self._indexes)
        other._built, other._observed = list(self._built), list(self._observed)
        other._unsettled = set(self._unsettled)
        other._predicted = {}
        other._attach(self.context.basis, self.context.view)
        return other

    @property
    def index_bytes(self) -> int:
        """Bytes of all indexes."""
        return sum(index.nbytes for index in self._indexes if index is not None)

    def _attach(self, basis: object, view: ModelView | None) -> None:
        layout = self._attention.layout
        self._log = SelectionLog(self.policy, self.geometry, self._site, 2 * layout.head_dim * layout.itemsize)
        self._access = RowAccess(self.history, self._attention, self._site, self._log.charge)
        self._gate = None if self._gates is None else self._gates(self._access)
        self.context = FrameContext(self.policy, self.geometry, self._access, basis, view)

    def _reads_all(self, layer: int, start: int, rows: int) -> LayerOutcome | None:
        visible, contract = start + rows, self.method.contract
        if layer in self._dense:
            return LayerOutcome.DENSE
        if self._computes_again or (rows > 1 and not contract.selects_in_prefill):
            return LayerOutcome.PREFILL
        if visible < self.policy.min_history:
            return LayerOutcome.SHORT
        self.context.enter(layer)
        if self.context.limit < self.context.persistent.rows:
            return LayerOutcome.SHORT
        if not contract.rebuilds and not self._built[layer] and self._observed[layer] < start:
            return LayerOutcome.MISSING
        index = self._indexes[layer]
        if not self._built[layer] or index is None or index.frontier != start:
            return LayerOutcome.BUILDING
        return LayerOutcome.COVERED if self.context.limit >= visible else None

    @contextlib.contextmanager
    def _changing(self, layer: int) -> Iterator[None]:
        """In the block the index of `layer` is changed in place: half a change, after an interrupt, is none."""
        self._unsettled.add(layer)
        yield
        self._unsettled.discard(layer)

    def _forget(self, layer: int) -> None:
        self._built[layer], self._observed[layer], self._indexes[layer] = False, 0, None
        self._unsettled.discard(layer)

    def _rewind(self, frontier: int) -> None:
        for layer in tuple(self._unsettled):
            self._forget(layer)
        for layer, index in enumerate(self._indexes):
            self._observed[layer] = min(self._observed[layer], frontier)
            if index is not None and self._built[layer] and index.frontier > frontier:
                with self._changing(layer):
                    shorter = self.method.truncate(index, frontier)
                if shorter is None:
                    self._forget(layer)
                else:
                    self._indexes[layer] = shorter

    def _decided(
        self, layer: int, index: Index, rows: StepRows, selection: Selection
    ) -> tuple[Selection, LayerOutcome]:
        outcome = cap_outcome(selection, self.context.budget)
        if outcome.exact or self._gate is None:
            return selection, outcome
        decided = self._gate.decide(layer, selection, self.context, Phase.INITIAL)
        if decided is None:
            self.context.widen(self._gate.gate.config.widen_factor)
            selection = self.method.select(self.context, layer, index, rows)
            if (outcome := cap_outcome(selection, self.context.budget)).exact:
                return selection, outcome
            decided = self._gate.decide(layer, selection, self.context, Phase.POST_WIDEN)
        assert decided is not None, "a wider search is not widened again"
        return selection, decided

    def _expand(self, index: Index, selection: Selection) -> Support:
        context = self.context
        return expand(
            self.method,
            index,
            selection,
            self.geometry,
            context.persistent,
            context.visible,
            None if context.first == context.visible else context.first,
        )

    def _gather(self, layer: int, table: BlockTable, support: Support, near: dict[int, Tensor]) -> list[ChosenRows]:
        attention, access = self._attention, self._access
        wanted = attention.rows(support)
        slots = access.slots(layer, wanted.device)
        if not near:
            return [attention.gather(table, slots, wanted)]
        here = ~access.lies_in(wanted, near)
        return [attention.gather(table, slots, wanted, here), attention.gather_near(near, wanted)]

    def _compute(
        self,
        layer: int,
        rows: StepRows,
        table: BlockTable,
        selection: Selection,
        support: Support,
        index: Index,
        parts: list[ChosenRows],
        sinks: Tensor | None,
    ) -> Tensor:
        attention, turned = self._attention, selection.repositioned
        state = attention.persistent_state(rows, table, support, self.context.persistent.recent, turned)
        for part in parts:
            state = state.merge(attention.chosen_state(rows, part, support, turned))
        if sinks is not None:
            state = state.with_sinks(sinks.float().unsqueeze(-1))
        output = state.output()
        if selection.correction is not None:
            share = selection.correction.share.view(-1, 1, 1)
            value = selection.correction.value.repeat_interleave(self.geometry.group, dim=0).unsqueeze(1)
            output = share * output + (1 - share) * value
        if type(self.method).feedback is not Method.feedback:
            units = selection.units.shape[1]
            mass = sum(attention.unit_mass(rows, part, support, state, units, turned) for part in parts)
            assert isinstance(mass, Tensor)
            self.method.feedback(self.context, layer, index, selection, mass)
        return output.transpose(0, 1).to(rows.queries.dtype)
