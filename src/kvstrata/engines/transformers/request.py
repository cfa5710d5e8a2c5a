"""One request: its history, its plan, and the forward steps that extend it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.contract.receipts import Recompute, StepReceipt
from kvstrata.engines.transformers.cache import RequestCache
from kvstrata.engines.transformers.inputs import OutputView, take_rows
from kvstrata.errors import DamagedError, Reason, StateError
from kvstrata.kernels.prefill import prefill_attention
from kvstrata.placement.layer_ahead import LayerAhead
from kvstrata.store.history import History

if TYPE_CHECKING:
    from kvstrata.engines.transformers.memory import Memory

__all__ = ["Request"]

Forward = Callable[..., Any]

_RECOVERIES = 8
"""Damaged chunks that one call recomputes before it gives the disk up."""


class Request:
    """Rows of one sequence. Made by `Memory.request` or `Memory.restore`; closed with the memory.

    cache: what Transformers gets as `past_key_values`. restored_tokens: rows that came from a session.
    """

    def __init__(self, memory: Memory, history: History, plan: LayerAhead) -> None:
        self.memory = memory
        self.history = history
        self.plan = plan
        self.cache = RequestCache(self, memory.context.abi.layers)
        self.recomputes: list[Recompute] = []
        self.last_step: StepReceipt | None = None
        self.closed = False
        self.restored_tokens = 0
        self._step: tuple[int, int] | None = None
        self._owed: list[int] = []
        self._recoveries = 0

    @property
    def frontier(self) -> int:
        """Committed rows, in tokens. Rows that a recovery was kept from recomputing count: the next step does it."""
        return self.history.frontier + (0 if self.in_step else len(self._owed))

    @property
    def token_ids(self) -> list[int]:
        """Ids of the committed rows."""
        return self.history.token_ids + self._owed

    @property
    def in_step(self) -> bool:
        """Whether the model is computing rows of this request just now."""
        return self._step is not None

    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `model.generate` that continue this request."""
        self._require_open()
        return {"past_key_values": self.cache, "use_cache": True}

    def forward(self, inner: Forward, input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward over the new rows, in slices whose bounds depend on positions only.

        A long input is cut at multiples of the memory's `prefill_chunk`. Where only the last row's logits are asked
        for, that row is computed alone: a restored request computes it alone too, and gets the same bits.
        """
        self._require_open()
        source = take_rows(input_ids, kwargs, self.frontier, self.memory.max_positions)
        start, rows = self.frontier, int(source.shape[1])
        name = "input_ids" if source is input_ids else "inputs_embeds"
        view = OutputView.take(kwargs, rows, self.memory.model.config)
        self.replay(inner, ())
        outputs, bounds = [], []
        for begin, end in self.memory.slices(start, rows, last_alone=view.last_only, whole=view.whole):
            first, stop = begin - start, end - start
            part = source[:, first:stop]
            ids = part[0].tolist() if name == "input_ids" else None
            outputs.append(self._run(inner, {name: part}, ids, kwargs | view.arguments(first, stop)))
            bounds.append((first, stop))
        return view.join(outputs, bounds)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store the new rows of `layer` and attend to everything up to them; [1, rows, query_heads, head_dim].

        query [1, query_heads, rows, head_dim]; key, value [1, kv_heads, rows, head_dim]. Blocks until cold segments
        are in.
        """
        if self._step is None:
            raise StateError(
                Reason.NOT_COMMITTED,
                "attention ran outside a step of this request",
                "call the attached model itself, not one of its submodules",
            )
        start, rows = self._step
        table = self.plan.before_layer(layer)
        kernel = self.memory.kernel
        if rows == 1:
            output = kernel.append_and_attend(key, value, query, table, start)
        else:
            kernel.append(key, value, table, start)
            size = self.memory.prefill_chunk
            parts = [
                prefill_attention(
                    query[:, :, i : i + size],
                    table,
                    start + i,
                    key[:, :, i : i + size],
                    value[:, :, i : i + size],
                    scale,
                    kernel.gather,
                    self.memory.workspace,
                )
                for i in range(0, rows, size)
            ]
            output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        self.plan.after_layer(layer)
        return output

    def recover(self, inner: Forward, error: DamagedError) -> None:
        """Revoke the damaged chunk and compute its rows, and those after it, again from the tokens.

        Errors: `error` itself where the tokens are not known, or when chunks keep being damaged.
        """
        digest = bytes.fromhex(error.chunk)
        index = next((i for i, record in enumerate(self.history.chunks) if record.digest == digest), None)
        if index is None or not self.history.named or self._recoveries == _RECOVERIES:
            raise error
        self._recoveries += 1
        position = index * self.history.context.chunk_tokens
        tokens = self.history.token_ids[position:]
        self.memory.revoke(self.history.chunks[index])
        # Noted before the rows are given up: whatever ends the recovery, the next step goes on with it.
        self._owed = tokens + self._owed
        self.history.rewind(position)
        self.recomputes.append(Recompute(position, len(tokens), error.reason, error.cause))
        self.memory.log.recomputed(len(tokens), max(0, self.restored_tokens - position))
        self.restored_tokens = min(self.restored_tokens, position)
        self._repay(inner, len(tokens))

    def replay(self, inner: Forward, tokens: Sequence[int]) -> None:
        """Compute the rows of known tokens, those of an interrupted recovery first; no logits are kept."""
        self._recoveries = 0
        self._repay(inner, len(self._owed))
        start = self.history.frontier
        for first, stop in self.memory.slices(start, len(tokens)):
            self._run_known(inner, list(tokens[first - start : stop - start]))

    def close(self) -> None:
        """Give up all rows."""
        if not self.closed:
            self.closed = True
            self.plan.close()
            self.history.close()

    def _repay(self, inner: Forward, rows: int) -> None:
        for first, stop in self.memory.slices(self.history.frontier, rows):
            self._run_known(inner, self._owed[: stop - first])
            del self._owed[: stop - first]

    def _run_known(self, inner: Forward, ids: list[int]) -> None:
        named = {"input_ids": torch.tensor([ids], device=self.memory.device)}
        self._run(inner, named, ids, self.memory.quiet_kwargs)

    def _run(self, inner: Forward, named: dict[str, Any], ids: list[int] | None, kwargs: dict[str, Any]) -> Any:
        rows = next(iter(named.values())).shape[1]
        for record in self.history.settle():
            self.memory.publish(record)
        while True:
            try:
                self.memory.activate(self, rows)
                self._step = (self.history.frontier, rows)
                with torch.no_grad(), self.memory.engaged():
                    output = inner(**named, **kwargs, past_key_values=self.cache, use_cache=True, attention_mask=None)
            except DamagedError as error:
                self._abort()
                self.recover(inner, error)
                continue
            except BaseException:
                self._abort()
                raise
            break
        start, self._step = self.history.frontier, None
        sealed = self.history.commit(rows, ids)
        for record in sealed:
            self.memory.publish(record)
        self.last_step = self.plan.end_step(start, rows, len(sealed))
        self.memory.log.step(self.last_step)
        return output

    def _abort(self) -> None:
        self._step = None
        self.plan.abort_step()

    def _require_open(self) -> None:
        if self.closed:
            raise StateError(Reason.CLOSED, "the request is closed", "ask the memory for a new request")
