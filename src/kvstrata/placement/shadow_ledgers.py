"""The four error ledgers of a sampled layer: each measured against dense attention, none made up from another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstrata.contract.error_ledgers import (
    ErrorLedgers,
    PayloadError,
    ReductionError,
    RepresentationError,
    SupportLedger,
)
from kvstrata.contract.method import AnswerClass
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.placement.expansion import Support
from kvstrata.placement.shadow import DenseReference, ShadowMeasures, average_values, entered, softmax_with_sinks
from kvstrata.placement.support_attention import ChosenRows

__all__ = ["measure_ledgers"]

_TOLERANCE = 1e-3
"""Largest element-wise difference, relative to the longest value, that fp32 merging and a 16-bit output may make."""


def measure_ledgers(
    reference: DenseReference,
    dense: tuple[Tensor, Tensor],
    selection: Selection,
    support: Support,
    parts: Sequence[ChosenRows],
    measures: ShadowMeasures,
    output: Tensor,
    answer: AnswerClass,
) -> ErrorLedgers:
    """The ledgers of one layer. dense: K and V [kv_heads, visible, head_dim]. parts: the rows that entered.
    output: [query_heads, rows, head_dim].

    Representation is `None` for a method that ranks by no score of its own, and reduction where positions were moved or
    a correction stands for the rows left out: then no reduction over the same rows with the same weights exists.
    """
    return ErrorLedgers(
        _representation(reference, selection, support),
        SupportLedger(
            int(measures.entered.double().mean().round()),
            support.visible,
            min(1.0, max(0.0, float(measures.omitted.mean()))),
            float(measures.support_error.mean()),
            float(measures.dense_norm.mean()),
            min(1.0, float(measures.recall.mean())),
        ),
        _payload(dense, selection, support, parts),
        _reduction(reference, selection, support, len(parts), output, answer),
    )


def _representation(reference: DenseReference, selection: Selection, support: Support) -> RepresentationError | None:
    """The index's score of each chosen unit against the best score of its rows that entered."""
    if selection.scores is None:
        return None
    heads, _, visible = reference.scores.shape
    rows, columns = _per_head(support.rows, heads), _per_head(support.columns, heads)
    found = reference.scores[:, -1].gather(-1, rows.clamp(0, visible - 1)).masked_fill(rows == NO_UNIT, -torch.inf)
    best = torch.full((heads, selection.units.shape[1]), -torch.inf, dtype=found.dtype, device=found.device)
    best = best.scatter_reduce(1, columns.clamp_min(0), found, "amax")
    known = (best > -torch.inf) & (selection.scores > -torch.inf)
    if not bool(known.any()):
        return None
    difference = (selection.scores.double() - best)[known]
    slack = 1e-4 * best[known].abs().clamp_min(1.0)
    return RepresentationError(
        int(known.sum()),
        float(difference.abs().mean()),
        float(difference.abs().max()),
        int((difference < -slack).sum()) if selection.scores_are_bounds else None,
    )


def _payload(
    dense: tuple[Tensor, Tensor], selection: Selection, support: Support, parts: Sequence[ChosenRows]
) -> PayloadError:
    """What entered, against what the store holds. Turned keys count as changed."""
    count, key_greatest, value_greatest = 0, 0.0, 0.0
    for part in parts:
        owners = part.keys.shape[0]
        heads = torch.arange(owners, device=part.keys.device) // max(1, owners // dense[0].shape[0])
        rows = _per_head(support.rows, owners).clamp_min(0)
        keys, values = (plane[heads.unsqueeze(-1), rows] for plane in dense)
        turned = selection.repositioned
        mine = part.keys
        if turned is not None:
            order = _per_head(support.order, owners)
            own = turned.keys if turned.keys.shape[0] == owners else turned.keys[heads]
            mine = own.gather(1, order.unsqueeze(-1).expand(-1, -1, own.shape[-1]))
        seen = part.visible.unsqueeze(-1)
        count += int(part.visible.sum())
        if bool(part.visible.any()):
            key_greatest = max(key_greatest, float((mine.float() - keys.float()).abs().masked_fill(~seen, 0).max()))
            difference = (part.values.float() - values.float()).abs().masked_fill(~seen, 0)
            value_greatest = max(value_greatest, float(difference.max()))
    return PayloadError(count, key_greatest, value_greatest)


def _reduction(
    reference: DenseReference,
    selection: Selection,
    support: Support,
    parts: int,
    output: Tensor,
    answer: AnswerClass,
) -> ReductionError | None:
    if selection.repositioned is not None or selection.correction is not None:
        return None
    heads, rows, visible = reference.scores.shape
    scores = reference.scores.masked_fill(~entered(support, heads, rows, visible), -torch.inf)
    if support.log_bias is not None:
        bias = torch.zeros(heads, visible + 1, dtype=scores.dtype, device=scores.device)
        place = _per_head(support.rows, heads).masked_fill(_per_head(support.rows, heads) == NO_UNIT, visible)
        bias.scatter_(1, place, support.log_bias.double())
        scores = scores + bias[:, None, :visible]
    expected = average_values(softmax_with_sinks(scores, reference.sinks), reference.values)
    longest = float(torch.linalg.vector_norm(reference.values, dim=-1).max())
    tolerance = max(_TOLERANCE, torch.finfo(output.dtype).eps) * max(1.0, longest)
    states = parts + (2 if support.sinks else 1)
    return ReductionError(states, float((output.double() - expected).abs().max()), tolerance, answer)


def _per_head(rows: Tensor, heads: int) -> Tensor:
    return rows.repeat_interleave(heads // rows.shape[0], dim=0)
