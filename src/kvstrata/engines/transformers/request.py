"""One request: its sequences, its plan, and the forward steps that extend them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.contract.receipts import Recompute, StepReceipt
from kvstrata.engines.transformers.cache import RequestCache
from kvstrata.engines.transformers.inputs import Columns, OutputView, Span, skip_known, slices, take_source
from kvstrata.engines.transformers.recovery import give_up_damaged, try_again
from kvstrata.engines.transformers.row import Row
from kvstrata.engines.transformers.selections import attend_span, begin_choosing, reads_beyond
from kvstrata.errors import BudgetError, ConfigurationError, DamagedError, Reason, StateError
from kvstrata.placement.gated import PostponedError, RecomputeError
from kvstrata.placement.layer_ahead import LayerAhead
from kvstrata.placement.policy import SelectionPolicy
from kvstrata.store.history import History

if TYPE_CHECKING:
    from kvstrata.engines.transformers.memory import Memory

__all__ = ["Request"]

Forward = Callable[..., Any]

_RECOVERIES = 8
"""Damaged chunks that one call recomputes before it gives the disk up."""


class Request:
    """Rows of one sequence, or of several that are computed together. Made by `Memory.request` or `Memory.restore`;
    closed with the memory.

    rows: the sequences. policy: what it may leave out, or `None` for an exact request. cache: what Transformers gets as
    `past_key_values`. recomputes: rows that were computed again.
    """

    def __init__(self, memory: Memory, row: Row, plan: LayerAhead, policy: SelectionPolicy | None = None) -> None:
        self.memory = memory
        self.policy = policy
        self.rows = [row]
        self.plan = plan
        self.cache = RequestCache(self, memory.context.abi.layers)
        self.recomputes: list[Recompute] = []
        self.last_step: StepReceipt | None = None
        self.closed = False
        self._spans: list[Span] | None = None
        self._drafts = False
        self._recoveries = 0
        self._layers_done = 0

    @property
    def row(self) -> Row:
        """The only sequence. Errors: `ConfigurationError` when there are several."""
        if len(self.rows) != 1:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"the request has {len(self.rows)} sequences",
                f"name one: request.rows[0] to request.rows[{len(self.rows) - 1}], or row=0 for `save`",
            )
        return self.rows[0]

    def row_at(self, index: int) -> Row:
        """One of its sequences. Errors: `ConfigurationError` for an index that it does not have."""
        if not 0 <= index < len(self.rows):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"row={index} of a request of {len(self.rows)}", "count its sequences from 0"
            )
        return self.rows[index]

    @property
    def history(self) -> History:
        """Rows of the only sequence."""
        return self.row.history

    @property
    def frontier(self) -> int:
        """Rows of the only sequence, in tokens."""
        return self.row.history.frontier if self.in_step else self.row.frontier

    @property
    def token_ids(self) -> list[int]:
        """Ids of the rows of the only sequence."""
        return self.row.token_ids

    @property
    def width(self) -> int:
        """Columns that the caller's tensors have by now: rows, padding, and what came after an end."""
        return min(row.width for row in self.rows)

    @property
    def in_step(self) -> bool:
        """Whether the model is computing rows of this request just now."""
        return self._spans is not None

    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `model.generate` that continue this request."""
        self.require_open()
        return {self.memory.wrapping.cache_name: self.cache, "use_cache": True}

    def forward(self, inner: Forward, input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward over the new columns, in slices whose bounds depend on positions only.

        A long input is cut at multiples of the memory's `prefill_chunk`. Where only the last column's logits are asked
        for, it is computed alone: a restored request computes it alone too, and gets the same bits.
        """
        self.require_open()
        source = take_source(input_ids, kwargs)
        self._align(int(source.shape[0]))
        if self._drafts:
            source = skip_known(source, self.rows, kwargs)
        columns = Columns.take(source, self.rows, kwargs, self.max_positions)
        view = OutputView.take(kwargs, columns.count, self.memory.model.config)
        self.replay(inner, ())
        drafts = columns.count if view.kept is None else len(view.kept) - 1
        for row, new in zip(self.rows, columns.new_rows(), strict=True):
            row.keep_drafts()
            if self._drafts and drafts > 0:
                row.draft(row.frontier + max(0, new - drafts))
        name = "input_ids" if source.dim() == 2 else "inputs_embeds"
        outputs, bounds, width = [], [], columns.width
        size = self.memory.prefill_chunk
        for begin, end in slices(size, width, columns.count, last_alone=view.last_only, whole=view.whole):
            first, stop = begin - width, end - width
            named = {name: source[:, first:stop]}
            spans = columns.spans(first, stop)
            outputs.append(self._run(inner, named, spans, kwargs | view.arguments(first, stop)))
            columns.note_hidden(first, stop)
            bounds.append((first, stop))
        return view.join(outputs, bounds)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new rows of `layer`, attend to what they see; [batch, columns, query_heads, head_dim].

        query [batch, query_heads, columns, head_dim]; key, value [batch, kv_heads, columns, head_dim]. Columns that are
        no rows get zeros. Blocks until cold segments are in.
        """
        if self._spans is None:
            raise StateError(
                Reason.NOT_COMMITTED,
                "attention ran outside a step of this request",
                "call the attached model itself, not one of its submodules",
            )
        if layer != self._layers_done:
            raise self._skipped(f"layer {layer} came after {self._layers_done} of {self.plan.layers} layers")
        tables = self.plan.before_layer(layer)
        batch, columns = query.shape[0], query.shape[2]
        rule = scale, window, sinks
        if len(self._spans) == batch == 1 and self._spans[0].rows == columns:
            (span,) = self._spans
            table = tables[self._place(span)]
            output = attend_span(self.memory, span, layer, query, key, value, table, *rule)
        else:
            output = query.new_zeros(batch, columns, query.shape[1], query.shape[3])
            for span in self._spans:
                own = slice(span.batch, span.batch + 1)
                q, k, v = (tensor[own][:, :, span.columns] for tensor in (query, key, value))
                table = tables[self._place(span)]
                output[span.batch, span.columns] = attend_span(self.memory, span, layer, q, k, v, table, *rule)[0]
        self.plan.after_layer(layer)
        self._layers_done += 1
        return output

    def begin_step(self, rows: Sequence[int]) -> None:
        """Plan a step of `rows` rows of each sequence. Errors: as `LayerAhead.begin_step`."""
        begin_choosing(self.plan, self.rows, rows)

    def note_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """The residual stream [batch, columns, hidden_size] that enters `layer` in this step."""
        for span in self._spans or ():
            if span.row.frame is not None:
                span.row.frame.note_hidden(layer, hidden[span.batch, span.columns])

    @property
    def max_positions(self) -> int | None:
        """Longest history in tokens; `None` for no limit."""
        return None if reads_beyond([self.policy]) else self.memory.max_positions

    def recover(self, inner: Forward, error: DamagedError) -> None:
        """Revoke the damaged chunk and compute its rows, and those after it, again from the tokens.

        Errors: `error` itself where the tokens are not known, or when chunks keep being damaged.
        """
        if self._recoveries == _RECOVERIES:
            raise error
        self._recoveries += 1
        self.repay(inner, give_up_damaged(self, error))

    def repay(self, inner: Forward, owed: Sequence[tuple[Row, int]]) -> None:
        """Compute so many rows again that each of the sequences owes."""
        for row, count in owed:
            self._repay(inner, row, count)

    def replay(self, inner: Forward, tokens: Sequence[int]) -> None:
        """Compute the rows of known tokens, those that are owed first; no logits are kept.

        tokens: they continue the only sequence.
        """
        self._recoveries = 0
        for row in self.rows:
            self._repay(inner, row, len(row.owed))
        if not tokens:
            return
        row = self.row
        start = row.history.frontier
        for first, stop in slices(self.memory.prefill_chunk, start, len(tokens)):
            self._run_known(inner, row, list(tokens[first - start : stop - start]))

    def crop(self, width: int) -> None:
        """Take back all columns from `width` on."""
        for row in self.rows:
            row.crop(width)

    def record_drafts(self) -> None:
        """From now on, rows of a call that wants the logits of several columns stay drafts until the next call."""
        self._drafts = True

    def keep_drafts(self) -> None:
        """What was a draft until now stays."""
        for row in self.rows:
            row.keep_drafts()

    def select(self, indices: Sequence[int], *, beams: bool = False) -> None:
        """Go on with the sequences `indices`, each a copy where it is named more than once; drop the others.

        beams: the rows from here on belong to beams and are never committed. Errors: `BudgetError` when the copies of
        the open tails do not fit.
        """
        sources, taken, chosen = self.rows, set[int](), list[Row]()
        try:
            for index, row in enumerate(sources):
                if beams:
                    row.hold()
                if index not in indices:
                    row.close()
            for index in indices:
                chosen.append(self._fork(sources[index]) if index in taken else sources[index])
                taken.add(index)
        except BaseException:
            for row in chosen:
                row.close()
            self.close()
            self.memory.reclaim()
            raise
        self.rows = chosen
        self.plan.replace([row.history for row in chosen])

    def finish(self, done: Sequence[bool]) -> None:
        """Note which sequences are finished: what comes after their end is nobody's history."""
        if len(done) == len(self.rows):
            for row, ended in zip(self.rows, done, strict=True):
                row.finished = row.finished or ended

    def close(self) -> None:
        """Give up all rows."""
        if not self.closed:
            self.closed = True
            self.plan.close()
            for row in self.rows:
                row.close()
            self.memory.forget(self)

    def require_open(self) -> None:
        """Errors: `StateError` when the request is closed."""
        if self.closed:
            raise StateError(Reason.CLOSED, "the request is closed", "ask the memory for a new request")

    def _align(self, batch: int) -> None:
        """A row for each sequence of a first batch; all as wide as the shortest, should a step have been cut short."""
        if len(self.rows) == 1 < batch and not self.rows[0].width:
            shadow = None if self.row.frame is None else self.row.frame.shadow
            self.rows += [self.memory.new_row(self.policy, shadow) for _ in range(batch - 1)]
            self.plan.replace([row.history for row in self.rows])
        width = self.width
        for row in self.rows:
            if row.width > width:
                row.crop(width)

    def _place(self, span: Span) -> int:
        return next(index for index, row in enumerate(self.rows) if row is span.row)

    def _fork(self, row: Row) -> Row:
        other = row.fork()
        if other is None:
            self.plan.yield_memory()
            other = row.fork()
        if other is None:
            self.memory.take_memory(self)
            other = row.fork()
        if other is None:
            need = self.memory.budget + self.memory.layout.segment_bytes * len(row.history.tail) * self.plan.layers
            raise BudgetError(
                Reason.BUDGET_TOO_SMALL,
                f"a copy of the open tail of a sequence does not fit the budget of {self.memory.budget} bytes",
                f"pass budget={need} or more, fewer beams or sequences, or smaller chunk_tokens",
                required_bytes=need,
            )
        return other

    def _repay(self, inner: Forward, row: Row, count: int) -> None:
        for first, stop in slices(self.memory.prefill_chunk, row.history.frontier, count):
            self._run_known(inner, row, row.owed[: stop - first])

    def _run_known(self, inner: Forward, row: Row, ids: list[int]) -> None:
        named = {"input_ids": torch.tensor([ids], device=self.memory.device)}
        span = Span(row, 0, slice(0, len(ids)), row.history.frontier, len(ids), ids)
        self._run(inner, named, [span], self.memory.wrapping.quiet_kwargs)

    def _run(self, inner: Forward, named: dict[str, Any], spans: list[Span], kwargs: dict[str, Any]) -> Any:
        counts = [sum(span.rows for span in spans if span.row is row) for row in self.rows]
        positions = _positions(next(iter(named.values())), spans)
        for row in self.rows:
            for record in row.history.settle():
                self.memory.publish(record)
        while True:
            try:
                self.memory.activate(self, counts)
                self._spans, self._layers_done = spans, 0
                began = self.memory.clock()
                with torch.no_grad():
                    output = self.memory.wrapping.compute(inner, self, named, positions, kwargs)
                if self._layers_done != self.plan.layers:
                    raise self._skipped(f"a step ended after {self._layers_done} of {self.plan.layers} layers")
            except (DamagedError, PostponedError, RecomputeError) as error:
                self._abort(again=True)
                try:
                    try_again(self, inner, error)
                except BaseException:
                    self._abort()
                    raise
                continue
            except BaseException:
                self._abort()
                self.memory.reclaim()
                raise
            break
        self._spans = None
        frames = [span.row.frame for span in spans if span.row.frame is not None]
        # Before rows are sealed: those that were computed over a part get a lineage of their own.
        receipts = tuple(frame.end_step() for frame in frames)
        sealed = [record for span in spans for record in span.row.history.commit(span.rows, span.ids)]
        for record in sealed:
            self.memory.publish(record)
        self.last_step = self.plan.end_step(len(sealed), receipts)
        self.memory.log.step(self.last_step)
        if len(spans) == 1:
            seconds = self.memory.clock() - began - self.last_step.stall_s
            self.memory.log.prefills.record(self.last_step.start, spans[0].rows, seconds)
        return output

    def _skipped(self, what: str) -> StateError:
        return StateError(
            Reason.NOT_COMMITTED, what, "restore the model's layers and config.num_hidden_layers, then call again"
        )

    def _abort(self, *, again: bool = False) -> None:
        self._spans = None
        for row in self.rows:
            if row.frame is not None:
                row.frame.abort_step(again=again)
        self.plan.abort_step()


def _positions(source: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """Position of every column, [batch, columns]: of a row in its own sequence, 0 for columns that are no rows."""
    positions = torch.zeros(source.shape[:2], dtype=torch.long)
    for span in spans:
        positions[span.batch, span.columns] = torch.arange(span.start, span.start + span.rows)
    return positions.to(source.device)
