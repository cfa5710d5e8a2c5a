"""What a forward call may ask of a request, and its outputs put together from slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstrata.engines.transformers.row import Row
from kvstrata.errors import ConfigurationError, Reason, UnsupportedError

__all__ = ["Columns", "OutputView", "Span", "skip_known", "slices", "take_source"]


@dataclass(frozen=True)
class Span:
    """The part of one sequence in a step.

    row: the sequence. batch: its place in the step's tensors. columns: where its rows stand there. start, rows: their
    positions. ids: their token ids, or `None` for embeddings.
    """

    row: Row
    batch: int
    columns: slice | list[int]
    start: int
    rows: int
    ids: list[int] | None


def take_source(input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor:
    """Ids [batch, columns] or embeddings [batch, columns, hidden]. Errors: `ConfigurationError` for none or both."""
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
    return source


def skip_known(source: torch.Tensor, rows: Sequence[Row], kwargs: dict[str, Any]) -> torch.Tensor:
    """`source` without the columns that the only sequence has already, and `position_ids` likewise.

    Transformers begins to draft with the whole sequence, whatever the cache holds. Where the ids differ, or no column
    would be left for a wanted row of logits, nothing is taken away and the positions are refused.
    """
    width, count, positions = rows[0].width, int(source.shape[1]), kwargs.get("position_ids")
    if source.dim() != 2 or not len(rows) == len(source) == 1 or not width or positions is None or positions[0, 0] != 0:
        return source
    mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep")
    if mask is None:
        mask = torch.ones_like(source)
    elif not isinstance(mask, torch.Tensor) or mask.shape != source.shape:
        return source
    known = source[0, :width][mask[0, :width] != 0]
    if known.tolist() != rows[0].token_ids or not isinstance(keep, int) or not 0 < keep <= count - width:
        return source
    kwargs["position_ids"] = positions[:, width:]
    return source[:, width:]


@dataclass(frozen=True)
class Columns:
    """New columns of a forward call: for each sequence those that are its rows, `None` for all of them.

    padding: whether the others are padding; else they came after the sequence was finished.
    """

    source: torch.Tensor
    rows: Sequence[Row]
    width: int
    visible: list[list[int] | None]
    padding: list[list[int]]

    @classmethod
    def take(cls, source: torch.Tensor, rows: Sequence[Row], kwargs: dict[str, Any], limit: int | None) -> Columns:
        """Read mask and positions, and take out of `kwargs` what a step sets by itself.

        limit: the model's context in tokens. Errors: `ConfigurationError` and `UnsupportedError` for what cannot
        continue the sequences.
        """
        batch, count = int(source.shape[0]), int(source.shape[1])
        if batch != len(rows):
            raise UnsupportedError(
                Reason.BATCH_UNSUPPORTED,
                f"a batch of {batch} for a request of {len(rows)} sequences",
                "make a new request, or fork the sequences with request.cache.batch_repeat_interleave(n) first",
            )
        width = rows[0].width
        padding = _padding(kwargs.pop("attention_mask", None), rows, width, count)
        visible: list[list[int] | None] = []
        for row, hidden in zip(rows, padding, strict=True):
            if row.finished:
                visible.append([])
            elif hidden:
                visible.append(sorted(set(range(count)) - set(hidden)))
            else:
                visible.append(None)
        columns = cls(source, rows, width, visible, padding)
        for index, (row, new) in enumerate(zip(rows, columns.new_rows(), strict=True)):
            if not row.finished and row.frontier + new == 0:
                raise ConfigurationError(
                    Reason.EMPTY_PROMPT, f"sequence {index} has no token", "leave it out, or give it one token at least"
                )
            if limit is not None and row.frontier + new > limit:
                raise ConfigurationError(
                    Reason.CONTEXT_EXCEEDED,
                    f"{row.frontier + new} tokens are more than the model's context of {limit}",
                    "shorten the prompt, or use a model with a longer context",
                )
        columns._check_positions(kwargs.pop("position_ids", None))
        if kwargs.get("output_attentions"):
            raise UnsupportedError(
                Reason.OPERATION_UNSUPPORTED,
                "output_attentions: weights are never materialised",
                "leave it out, or make the call inside `with memory.stock():`",
            )
        for name in ("past_key_values", "cache", "use_cache"):
            kwargs.pop(name, None)
        return columns

    @property
    def count(self) -> int:
        """New columns."""
        return int(self.source.shape[1])

    def new_rows(self) -> list[int]:
        """How many of the new columns are rows, for each sequence."""
        return [self.count if seen is None else len(seen) for seen in self.visible]

    def spans(self, first: int, stop: int) -> list[Span]:
        """What the step over the columns [first, stop) computes of each sequence, from its frontier on."""
        result = []
        for batch, (row, seen) in enumerate(zip(self.rows, self.visible, strict=True)):
            inside = None if seen is None else [column - first for column in seen if first <= column < stop]
            if inside is not None and not inside:
                continue
            rows = stop - first if inside is None else len(inside)
            columns = _columns(inside, rows)
            ids = None
            if self.source.dim() == 2:
                part = self.source[batch, first:stop]
                ids = part[columns].tolist()
            result.append(Span(row, batch, columns, row.frontier, rows, ids))
        return result

    def note_hidden(self, first: int, stop: int) -> None:
        """Tell every sequence about columns of [first, stop) that are none of its rows."""
        for row, seen, padding in zip(self.rows, self.visible, self.padding, strict=True):
            if seen is None:
                continue
            hidden = set(range(first, stop)).difference(seen)
            masked = hidden.intersection(padding)
            row.append(self.width, sorted(masked), padding=True)
            row.append(self.width, sorted(hidden - masked), padding=False)

    def _check_positions(self, positions: torch.Tensor | None) -> None:
        if positions is None:
            return
        if positions.dim() != 2 or positions.shape[1] != self.count or positions.shape[0] not in (1, len(self.rows)):
            raise _positions(f"position_ids of shape {tuple(positions.shape)}")
        for index, (row, seen) in enumerate(zip(self.rows, self.visible, strict=True)):
            given = positions[index if positions.shape[0] > 1 else 0].tolist()
            found = given if seen is None else [given[column] for column in seen]
            if found != list(range(row.frontier, row.frontier + len(found))):
                raise _positions(f"positions that do not continue sequence {index} at {row.frontier}")


def _columns(inside: list[int] | None, rows: int) -> slice | list[int]:
    if inside is None:
        return slice(0, rows)
    return slice(inside[0], inside[-1] + 1) if inside[-1] - inside[0] + 1 == rows else inside


def _padding(mask: Any, rows: Sequence[Row], width: int, count: int) -> list[list[int]]:
    """New columns that the mask hides, for each sequence."""
    if mask is None:
        if any(row.padding for row in rows):
            raise UnsupportedError(
                Reason.MASK_UNSUPPORTED,
                "no attention mask for sequences that began with one",
                "pass the whole mask: one value for every column so far and every new one",
            )
        return [[] for _ in rows]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        kind = f"of {mask.dim()} dimensions" if isinstance(mask, torch.Tensor) else f"as a {type(mask).__name__}"
        raise UnsupportedError(Reason.MASK_UNSUPPORTED, f"an attention mask {kind}", "pass none: steps are causal")
    if bool(mask.all()) and tuple(mask.shape) == (len(rows), count) and not any(row.padding for row in rows):
        return [[] for _ in rows]
    if tuple(mask.shape) != (len(rows), width + count):
        raise UnsupportedError(
            Reason.MASK_UNSUPPORTED,
            f"an attention mask of shape {tuple(mask.shape)} for {len(rows)} sequences of {width} + {count} columns",
            "pass one value for every column so far and every new one",
        )
    if bool(mask.all()):
        if any(row.padding for row in rows):
            raise _hides("shows columns that were padding")
        return [[] for _ in rows]
    result = []
    for row, values in zip(rows, mask, strict=True):
        hidden = torch.nonzero(values == 0).flatten().tolist()
        past = [column for column in hidden if column < width]
        if set(past) - set(row.padding) - set(row.beyond):
            raise _hides("hides rows that are part of the history")
        if set(row.padding) - set(past):
            raise _hides("shows columns that were padding")
        result.append([column - width for column in hidden if column >= width])
    return result


def _hides(what: str) -> UnsupportedError:
    return UnsupportedError(
        Reason.PADDING_UNSUPPORTED, f"the attention mask {what}", "keep the mask of the columns so far as it was"
    )


def _positions(what: str) -> UnsupportedError:
    return UnsupportedError(
        Reason.POSITIONS_UNSUPPORTED,
        what,
        "leave position_ids out, or let the attention mask hide padding and what came after its end",
    )


def prompt_ids(token_ids: Sequence[int], limit: int | None) -> list[int]:
    """The ids of a prompt as plain numbers. limit: tokens of the model's context. Errors: `ConfigurationError`."""
    ids = [int(token) for token in token_ids]
    if not ids:
        raise ConfigurationError(Reason.EMPTY_PROMPT, "the prompt has no tokens", "pass at least one token")
    if limit is not None and len(ids) > limit:
        raise ConfigurationError(
            Reason.CONTEXT_EXCEEDED,
            f"{len(ids)} tokens are more than the model's context of {limit}",
            "shorten the prompt, or use a model with a longer context",
        )
    return ids


def slices(
    size: int, start: int, rows: int, *, last_alone: bool = False, whole: bool = False
) -> Iterator[tuple[int, int]]:
    """Bounds of the forward steps for `rows` rows from `start`: cut at multiples of `size`."""
    stop = start + rows
    if whole:
        yield start, stop
        return
    end = stop - 1 if last_alone and rows > 1 else stop
    while start < end:
        following = min(end, (start // size + 1) * size)
        yield start, following
        start = following
    if end < stop:
        yield end, stop


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
                    joined = parts[-1].new_empty(parts[-1].shape[0], len(self.kept), parts[-1].shape[-1])
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
