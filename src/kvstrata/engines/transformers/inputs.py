"""What a forward call may ask of a request, and its outputs put together from slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvstrata.errors import ConfigurationError, Reason, UnsupportedError

__all__ = ["OutputView", "take_rows"]


def take_rows(input_ids: torch.Tensor | None, kwargs: dict[str, Any], start: int, limit: int | None) -> torch.Tensor:
    """The new rows of one unpadded sequence that continues a history of `start` rows: ids or embeddings.

    limit: the model's context in tokens. Takes out of `kwargs` what a step sets by itself. Errors:
    `ConfigurationError` and `UnsupportedError` for anything else.
    """
    embeds = kwargs.pop("inputs_embeds", None)
    if embeds is not None and input_ids is not None:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, "input_ids and inputs_embeds were both passed", "pass one of them"
        )
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
    rows = int(source.shape[1])
    if limit is not None and start + rows > limit:
        raise ConfigurationError(
            Reason.CONTEXT_EXCEEDED,
            f"{start + rows} tokens are more than the model's context of {limit}",
            "shorten the prompt, or use a model with a longer context",
        )
    mask = kwargs.pop("attention_mask", None)
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            kind = f"of {mask.dim()} dimensions" if isinstance(mask, torch.Tensor) else f"as a {type(mask).__name__}"
            raise UnsupportedError(Reason.MASK_UNSUPPORTED, f"an attention mask {kind}", "pass none: steps are causal")
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
    return source


@dataclass(frozen=True)
class OutputView:
    """What the caller wants to see of the outputs of `rows` rows.

    kept: the rows whose logits are kept, or `None` for all of them. last_only: the last row's alone. whole: losses or
    hidden states are wanted, which come from one step. as_tuple: plain tuples instead of model outputs.
    """

    rows: int
    kept: torch.Tensor | None
    last_only: bool
    whole: bool
    as_tuple: bool

    @classmethod
    def take(cls, kwargs: dict[str, Any], rows: int, config: Any) -> OutputView:
        """Read the view from the keyword arguments of a forward call, and take out what `arguments` sets."""
        whole = kwargs.get("labels") is not None or bool(kwargs.get("output_hidden_states"))
        wanted = kwargs.pop("return_dict", None)
        as_tuple = not (getattr(config, "return_dict", True) if wanted is None else wanted)
        keep = kwargs.get("logits_to_keep", 0)
        kept: torch.Tensor | None = None
        if isinstance(keep, torch.Tensor) and keep.dim() == 1:
            kept = torch.where(keep < 0, keep + rows, keep)
        elif int(keep) > 0:
            kept = torch.arange(max(0, rows - int(keep)), rows)
        last_only = kept is not None and kept.tolist() == [rows - 1]
        return cls(rows, kept, last_only and not whole, whole, as_tuple)

    def arguments(self, first: int, stop: int) -> dict[str, Any]:
        """Keyword arguments of the step that computes rows [first, stop)."""
        if self.kept is None or self.whole:
            return {"return_dict": True}
        inside = self.kept[self._inside(first, stop)] - first
        # A step without wanted rows computes the logits of one, the least that there is.
        return {"return_dict": True, "logits_to_keep": inside if len(inside) and not self.last_only else 1}

    def join(self, outputs: list[Any], bounds: list[tuple[int, int]]) -> Any:
        """One output for all slices, `bounds` being the rows of each."""
        last = outputs[-1]
        if len(outputs) > 1 and not self.last_only:
            for field in ("logits", "last_hidden_state"):
                if getattr(last, field, None) is None:
                    continue
                parts: list[torch.Tensor] = [getattr(output, field) for output in outputs]
                if field == "logits" and self.kept is not None:
                    joined = parts[-1].new_empty(1, len(self.kept), parts[-1].shape[-1])
                    for part, (first, stop) in zip(parts, bounds, strict=True):
                        inside = self._inside(first, stop)
                        if inside.any():
                            joined[:, inside] = part
                else:
                    joined = torch.cat(parts, dim=1)
                setattr(last, field, joined)
        return last.to_tuple() if self.as_tuple else last

    def _inside(self, first: int, stop: int) -> torch.Tensor:
        assert self.kept is not None
        return (self.kept >= first) & (self.kept < stop)
