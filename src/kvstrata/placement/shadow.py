"""The dense shadow: what a selection left out, against attention over every legal row of the same step.

With p the dense weights, R the rows that entered and O those left out, o = (1 - delta) o_R + delta o_O, where delta is
the mass of O and o_R, o_O are the averages over either part. So o_R - o = delta (o_R - o_O), which is at most
2 delta V_max where no value is longer than V_max. Everything is computed in float64 from the rows as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.selection import NO_UNIT
from kvstrata.placement.expansion import Support

__all__ = ["DenseReference", "ShadowMeasures", "average_values", "entered", "softmax_with_sinks"]


@dataclass(frozen=True, eq=False)
class ShadowMeasures:
    """What one selection of one layer cost its query rows. All tensors [query_heads, rows], float64 but for `entered`.

    entered: rows that entered attention, int64. recall: the share of as many rows of the highest dense weight that are
    among them; positions are compared with positions, whatever the unit. retained, omitted: dense weight of the rows
    that entered and of those left out. dense_norm: length of the dense output. error, relative_error: length of the
    difference between the method's output and the dense one, and that over `dense_norm`. support_error: the same for
    exact attention over the rows that entered, which is the support's own part of `error`. bound: 2 * omitted * V_max,
    which holds for `support_error`.
    """

    entered: Tensor
    recall: Tensor
    retained: Tensor
    omitted: Tensor
    dense_norm: Tensor
    error: Tensor
    relative_error: Tensor
    support_error: Tensor
    bound: Tensor

    def means(self) -> dict[str, float]:
        """The mean of every measure over heads and rows."""
        return {field.name: float(getattr(self, field.name).double().mean()) for field in fields(self)}


@dataclass(frozen=True, eq=False)
class DenseReference:
    """Dense attention of one layer's query rows, once for all selections that are held against it.

    scores: float64 [query_heads, rows, visible], scaled, -inf where a row does not see another. values: float64
    [kv_heads, visible, head_dim]. sinks: float64 [query_heads], learned logits that take weight and give nothing, or
    `None`. weights: softmax of the scores; sums to less than 1 with sinks. output: [query_heads, rows, head_dim].
    rank: int64, place of every row by weight, the lower position first in a tie.
    """

    scores: Tensor
    values: Tensor
    sinks: Tensor | None
    weights: Tensor
    output: Tensor
    rank: Tensor

    @classmethod
    def of(
        cls, queries: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None
    ) -> DenseReference:
        """From `queries` [query_heads, rows, head_dim], the newest rows, and `keys`, `values` [kv_heads, visible,
        head_dim] of all rows that the last of them sees.

        Errors: `ConfigurationError` when the shapes do not fit together.
        """
        heads, rows, dim = queries.shape
        kv_heads, visible = keys.shape[:2]
        if heads % kv_heads or keys.shape[-1] != dim or values.shape[:2] != keys.shape[:2] or rows > visible:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit",
            )
        grouped = queries.double().reshape(kv_heads, -1, dim)
        scores = (grouped @ keys.double().mT * scale).reshape(heads, rows, visible)
        last = torch.arange(visible - rows, visible, device=keys.device).unsqueeze(-1)
        scores = scores.masked_fill(torch.arange(visible, device=keys.device) > last, -torch.inf)
        return cls.of_scores(scores, values.double(), None if sinks is None else sinks.double())

    @classmethod
    def of_scores(cls, scores: Tensor, values: Tensor, sinks: Tensor | None = None) -> DenseReference:
        """From `scores`, `values` and `sinks` as the attributes of these names hold them."""
        weights = softmax_with_sinks(scores, sinks)
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        rank = torch.empty_like(order)
        rank.scatter_(-1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order))
        return cls(scores, values, sinks, weights, average_values(weights, values), rank)

    def measure(self, support: Support, output: Tensor, recent: int | None = None) -> ShadowMeasures:
        """Hold `support` and the method's `output` [query_heads, rows, head_dim] against the dense answer.

        recent: rows that each query row sees of the persistent recent ones, itself included, in a step of several rows;
        all that are there unless given. Errors: `ConfigurationError` for a support over another number of rows.
        """
        heads, rows, visible = self.scores.shape
        return self.measure_rows(entered(support, heads, rows, visible, recent), output)

    def measure_rows(self, inside: Tensor, output: Tensor) -> ShadowMeasures:
        """The same for rows given as a bool mask [query_heads, rows, visible]."""
        heads = self.scores.shape[0]
        inside = inside & (self.scores > -torch.inf)
        count = inside.sum(-1)
        top = self.rank < count.unsqueeze(-1)
        omitted = self.weights.masked_fill(inside, 0.0).sum(-1)
        part = average_values(softmax_with_sinks(self.scores.masked_fill(~inside, -torch.inf), self.sinks), self.values)
        error = torch.linalg.vector_norm(output.double() - self.output, dim=-1)
        norm = torch.linalg.vector_norm(self.output, dim=-1)
        longest = torch.linalg.vector_norm(self.values, dim=-1).amax(-1)
        longest = longest.repeat_interleave(heads // longest.shape[0]).unsqueeze(-1)
        return ShadowMeasures(
            entered=count,
            recall=(top & inside).sum(-1).double() / count.clamp_min(1),
            retained=self.weights.masked_fill(~inside, 0.0).sum(-1),
            omitted=omitted,
            dense_norm=norm,
            error=error,
            relative_error=torch.where(error == 0, 0.0, error / norm),
            support_error=torch.linalg.vector_norm(part - self.output, dim=-1),
            bound=2 * omitted * longest,
        )


def entered(support: Support, query_heads: int, rows: int, visible: int, recent: int | None = None) -> Tensor:
    """Which of the `visible` positions enter attention, bool [query_heads, rows, visible].

    recent: see `DenseReference.measure`. Errors: `ConfigurationError` for a support over another number of rows.
    """
    if support.visible != visible:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"a support over {support.visible} rows does not fit {visible} dense ones"
        )
    chosen = support.rows
    inside = torch.zeros(chosen.shape[0], visible + 1, dtype=torch.bool, device=chosen.device)
    inside.scatter_(1, chosen.masked_fill(chosen == NO_UNIT, visible), True)
    inside = inside[:, :visible].repeat_interleave(query_heads // chosen.shape[0], dim=0)
    inside[:, : support.sinks] = True
    inside = inside.unsqueeze(1).repeat(1, rows, 1)
    position = torch.arange(visible, device=chosen.device)
    newest = position[visible - rows :].unsqueeze(-1)
    window = (position >= support.recent) & (position <= newest)
    if recent is not None:
        window &= position > newest - recent
    return inside | window


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension; sinks [query_heads] take weight, so that the rest sums to less than 1."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


def average_values(weights: Tensor, values: Tensor) -> Tensor:
    """[query_heads, rows, head_dim]: `weights` [query_heads, rows, visible] over `values` [kv_heads, visible, dim]."""
    heads, rows, visible = weights.shape
    grouped = weights.reshape(values.shape[0], -1, visible)
    return (grouped @ values).reshape(heads, rows, -1)
