"""From scores of units to the units that a budget allows: the same rules for every method.

Ties go to the lower unit, so that a choice is a function of the scores alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.contract.budget import EstimatedMass, SelectionBudget, Threshold
from kvstrata.contract.method import GroupSharing
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.selection import NO_UNIT

__all__ = ["Chosen", "choose", "scores_of", "share_scores", "top_units"]


@dataclass(frozen=True, eq=False)
class Chosen:
    """units: int64 [owners, n], best first, filled up with `NO_UNIT`. capped: an owner wanted more than its rows."""

    units: Tensor
    capped: bool


def share_scores(scores: Tensor, sharing: GroupSharing, group: int) -> Tensor:
    """Scores [query_heads, units] to those of the owners: themselves, or [kv_heads, units] by `sharing`.

    A unit that is -inf for a head is so for the group, unless MAX or SOFTMAX_SUM finds it in another head. SOFTMAX_SUM
    gives the logarithm of the sum, which keeps the order of units whose share underflows, and is a margin or a mass
    like other scores. Errors: `ConfigurationError` for QUERY_SUM and QUERY_FREE, which are not about scores.
    """
    if sharing is GroupSharing.SEPARATE:
        return scores
    grouped: Tensor = scores.reshape(scores.shape[0] // group, group, scores.shape[-1])
    if sharing is GroupSharing.MAX:
        return grouped.amax(1)
    if sharing is GroupSharing.SUM:
        return grouped.sum(1)
    if sharing is GroupSharing.MEAN:
        return grouped.mean(1)
    if sharing is GroupSharing.SOFTMAX_SUM:
        total = torch.logsumexp(grouped, dim=-1, keepdim=True)
        return (grouped - total.masked_fill(total == -torch.inf, 0.0)).logsumexp(1)
    raise ConfigurationError(Reason.INVALID_ARGUMENT, f"scores cannot be shared by {sharing}")


def scores_of(scores: Tensor, units: Tensor) -> Tensor:
    """The scores fp32 [query_heads, n] of `units` [owners, n] out of `scores` [query_heads, units]; -inf for none."""
    each = units.repeat_interleave(scores.shape[0] // units.shape[0], dim=0)
    return scores.float().gather(-1, each.clamp_min(0)).masked_fill(each == NO_UNIT, -torch.inf)


def top_units(scores: Tensor, count: int) -> Tensor:
    """The `count` best units of every owner, int64 [owners, min(count, units)], best first, the lower one in a tie.

    Units that score -inf are not chosen: `NO_UNIT` stands in their place.
    """
    count = min(count, scores.shape[-1])
    values, units = torch.sort(scores, dim=-1, descending=True, stable=True)
    return units[..., :count].masked_fill(values[..., :count] == -torch.inf, NO_UNIT)


def choose(
    scores: Tensor,
    rows: Tensor,
    budget: SelectionBudget,
    allowance: int,
    log_mass: Tensor | None = None,
) -> Chosen:
    """The best units of every owner, as far as budget and `allowance` go.

    scores: [owners, units], -inf for what must not be chosen. rows: int64 [units] or [owners, units], rows that a unit
    would bring in. allowance: rows an owner may choose. log_mass: [owners, units], logarithms of the attention mass
    that a unit is believed to hold, for `EstimatedMass`; the scores unless given. A unit that would pass the allowance
    ends the list, so that the choice under a smaller allowance is a prefix of the one under a larger. A mass of 1
    wants every unit.
    """
    values, units = torch.sort(scores, dim=-1, descending=True, stable=True)
    sizes = rows.expand_as(scores).gather(-1, units)
    wanted = values > -torch.inf
    if isinstance(budget, Threshold) and scores.shape[-1]:
        wanted &= values >= values[..., :1] - budget.margin
    if isinstance(budget, EstimatedMass) and budget.mass < 1 and scores.shape[-1]:
        believed = values if log_mass is None else log_mass.gather(-1, units)
        share = torch.softmax(believed.double().masked_fill(~wanted, -torch.inf), dim=-1).cumsum(-1)
        # A unit is wanted while those before it fall short.
        wanted[..., 1:] &= share[..., :-1] < budget.mass
    taken = wanted & ((sizes * wanted).cumsum(-1) <= allowance)
    count = int(taken.sum(-1).max()) if taken.numel() else 0
    capped = isinstance(budget, Threshold | EstimatedMass) and bool((wanted & ~taken).any())
    return Chosen(units.masked_fill(~taken, NO_UNIT)[..., :count], capped)
