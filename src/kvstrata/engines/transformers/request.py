"""One request: its history, its plan, and the forward steps that extend it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.contract.receipts import Recompute, StepReceipt
from kvstrata.engines.transformers.cache import RequestCache
from kvstrata.errors import ConfigurationError, DamagedError, Reason, StateError, UnsupportedError
from kvstrata.kernels.prefill import prefill_attention
from kvstrata.placement.layer_ahead import LayerAhead
from kvstrata.store.history import History

if TYPE_CHECKING:
    from kvstrata.engines.transformers.memory import Memory

__all__ = ["Request"]

Forward = Callable[..., Any]


class Request:
    """Rows of one sequence. Made by `Memory.request` or `Memory.restore`; closed with the memory.

    cache: what Transformers gets as `past_key_values`.
    """

    def __init__(self, memory: Memory, history: History, plan: LayerAhead) -> None:
        self.memory = memory
        self.history = history
        self.plan = plan
        self.cache = RequestCache(self, memory.context.abi.layers)
        self.recomputes: list[Recompute] = []
        self.last_step: StepReceipt | None = None
        self.closed = False
        self._step: tuple[int, int] | None = None

    @property
    def frontier(self) -> int:
        """Committed rows, in tokens."""
        return self.history.frontier

    @property
    def token_ids(self) -> list[int]:
        """Ids of the committed rows."""
        return list(self.history.token_ids)

    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `model.generate` that continue this request."""
        self._require_open()
        return {"past_key_values": self.cache, "use_cache": True}

    def forward(self, inner: Forward, input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward over the new rows, in slices whose bounds depend on positions only.

        A long input is cut at multiples of the memory's `prefill_chunk`. Where only the last row's logits are asked
        for,
        that row is computed alone: a restored request computes it alone too, and gets the same bits.
        """
        self._require_open()
        rows = self._check(input_ids, kwargs)
        embeds = kwargs.pop("inputs_embeds", None)
        source = input_ids if embeds is None else embeds
        assert source is not None
        start, outputs = self.frontier, []
        last_only = kwargs.get("logits_to_keep") == 1
        whole = kwargs.get("labels") is not None or bool(kwargs.get("output_hidden_states"))
        for first, stop in self.memory.slices(start, rows, last_alone=last_only and not whole, whole=whole):
            part = source[:, first - start : stop - start]
            named = {"input_ids": part} if embeds is None else {"inputs_embeds": part}
            outputs.append(self._run(inner, named, None if embeds is not None else part[0].tolist(), kwargs))
        return outputs[-1] if len(outputs) == 1 or last_only else _joined(outputs)

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
        """Revoke the damaged chunk and compute its rows, and those after it, again from the tokens."""
        digest = bytes.fromhex(error.chunk)
        index = next((i for i, record in enumerate(self.history.chunks) if record.digest == digest), None)
        if index is None:
            raise error
        position = index * self.history.context.chunk_tokens
        tokens = self.history.token_ids[position:]
        self.memory.revoke(self.history.chunks[index])
        self.history.rewind(position)
        self.recomputes.append(Recompute(position, len(tokens), error.reason, error.cause))
        self.memory.log.recomputed(len(tokens))
        self.replay(inner, tokens)

    def replay(self, inner: Forward, tokens: Sequence[int]) -> None:
        """Compute the rows of known tokens; no logits are kept."""
        start = self.frontier
        device = self.memory.device
        for first, stop in self.memory.slices(start, len(tokens)):
            ids = list(tokens[first - start : stop - start])
            named = {"input_ids": torch.tensor([ids], device=device)}
            self._run(inner, named, ids, self.memory.quiet_kwargs)

    def close(self) -> None:
        """Give up all rows."""
        if not self.closed:
            self.closed = True
            self.plan.abort_step()
            self.history.close()

    def _run(self, inner: Forward, named: dict[str, Any], ids: list[int] | None, kwargs: dict[str, Any]) -> Any:
        rows = next(iter(named.values())).shape[1]
        while True:
            try:
                self.memory.activate(self, rows)
                self._step = (self.frontier, rows)
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
        start, self._step = self.frontier, None
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

    def _check(self, input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> int:
        """Refuse what is not one unpadded sequence that continues the history. Returns the rows that come in."""
        embeds = kwargs.get("inputs_embeds")
        source = embeds if embeds is not None else input_ids
        if source is None or source.shape[1] == 0:
            raise ConfigurationError(
                Reason.EMPTY_PROMPT,
                "there is no new token to compute",
                "pass at least one token; restore(..., token_ids=prompt) leaves the prompt's last one to compute",
            )
        if source.shape[0] != 1:
            raise UnsupportedError(
                Reason.BATCH_UNSUPPORTED, f"a batch of {source.shape[0]} sequences", "run one sequence per request"
            )
        rows, start = int(source.shape[1]), self.frontier
        limit = self.memory.max_positions
        if limit is not None and start + rows > limit:
            raise ConfigurationError(
                Reason.CONTEXT_EXCEEDED,
                f"{start + rows} tokens are more than the model's context of {limit}",
                "shorten the prompt, or use a model with a longer context",
            )
        mask = kwargs.pop("attention_mask", None)
        if mask is not None:
            if mask.dim() != 2:
                raise UnsupportedError(Reason.MASK_UNSUPPORTED, f"an attention mask of {mask.dim()} dimensions")
            if not bool(mask.all()):
                raise UnsupportedError(
                    Reason.PADDING_UNSUPPORTED, "the attention mask hides tokens", "pass one sequence without padding"
                )
        positions = kwargs.pop("position_ids", None)
        if positions is not None and (
            positions.shape != (1, rows)
            or int(positions[0, 0]) != start
            or (rows > 1 and not bool((positions[0].diff() == 1).all()))
        ):
            raise UnsupportedError(
                Reason.POSITIONS_UNSUPPORTED,
                f"positions that do not continue the history at {start}",
                "pass the ids that follow the committed rows, or restore(..., token_ids=prompt)",
            )
        if kwargs.get("output_attentions"):
            raise UnsupportedError(Reason.OPERATION_UNSUPPORTED, "output_attentions: weights are never materialised")
        kwargs.pop("past_key_values", None)
        kwargs.pop("use_cache", None)
        return rows


def _joined(outputs: list[Any]) -> Any:
    """One output whose logits, or last hidden states, are those of all slices."""
    last = outputs[-1]
    for field in ("logits", "last_hidden_state"):
        if getattr(last, field, None) is not None:
            setattr(last, field, torch.cat([getattr(output, field) for output in outputs], dim=1))
    return last
