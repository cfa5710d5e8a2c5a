"""The attention functions that Transformers calls during a step, registered only while a model is attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvstrata.errors import Reason, StateError, UnsupportedError
from kvstrata.kernels.block_table import BlockTable
from kvstrata.kernels.decode import DecodeAttention
from kvstrata.kernels.prefill import PrefillWorkspace, prefill_attention

if TYPE_CHECKING:
    from kvstrata.engines.transformers.request import Request

__all__ = ["PagedAttention", "attend", "eager_attention", "register", "unregister"]


class PagedAttention:
    """Attention of new rows of one sequence over a block table: the kernel for one row, or for a block of them."""

    def __init__(self, kernel: DecodeAttention, workspace: PrefillWorkspace) -> None:
        self._kernel = kernel
        self._workspace = workspace

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: BlockTable,
        start: int,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store the rows at `start` and attend; [1, rows, query_heads, head_dim].

        query [1, query_heads, rows, head_dim]; key, value [1, kv_heads, rows, head_dim]. window: tokens that a row
        sees, its own included. sinks: [query_heads], or `None`.
        """
        rows = query.shape[2]
        if rows == 1:
            first = 0 if window is None else max(0, start + 1 - window)
            return self._kernel.append_and_attend(
                key, value, query, table, start, scale=scale, start=first, sinks=sinks
            )
        self._kernel.append(key, value, table, start)
        size = self._workspace.rows
        parts = [
            prefill_attention(
                query[:, :, i : i + size],
                table,
                start + i,
                key[:, :, i : i + size],
                value[:, :, i : i + size],
                scale,
                self._kernel.gather,
                self._workspace,
                window=window,
                sinks=sinks,
            )
            for i in range(0, rows, size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def register(name: str, function: Callable[..., Any]) -> None:
    """Enter an attention function into Transformers' registries under `name`, which must be the caller's own."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _no_mask)


def unregister(name: str) -> None:
    """Take it out again."""
    ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


def eager_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The attention function of steps that are not compiled; finds the request on the keys."""
    request = getattr(key, "kvstrata_request", None)
    if request is None:
        raise StateError(Reason.NOT_COMMITTED, "rows reached the attention function without passing through a request")
    rule = kwargs["scaling"], kwargs.get("sliding_window"), kwargs.get("s_aux"), kwargs.get("softcap")
    return attend(request, module.layer_idx, query, key, value, *rule), None


def attend(
    request: Request,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """`Request.attend`, by the rule of a module. Errors: `UnsupportedError` if that is not its family's."""
    rule = request.memory.rules[layer]
    # The plan has counted on the family's rule; by another one a module would see rows that are not there.
    if window != rule.window or (sinks is not None) != rule.sinks or softcap is not None:
        raise UnsupportedError(
            Reason.MODEL_UNSUPPORTED,
            f"layer {layer} attends by another rule than its family: sliding_window={window}, "
            f"sinks={'yes' if sinks is not None else 'no'}, softcap={softcap}; expected {rule}",
            "use the stock cache for this model",
        )
    return request.attend(layer, query, key, value, scale, window, sinks)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask is built: what is a row in a step and what is padding is known, and the kernels are causal."""
