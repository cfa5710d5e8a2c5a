"""What it is worth to keep a chunk in a tier, in seconds: pure arithmetic.

    V(c, j) = p_c [T_recompute(c) - T_promote(c, j)] - C_capacity(M_c, j) - C_write(c, j)

c is a chunk of M_c bytes, j a tier, p_c the probability that the chunk is used again within a horizon. It is a rule
that shows the trade, not an optimal policy: recency, counters and admission filters each estimate a part of it.

Reuse is taken to be a Poisson process whose rate drifts, so that older uses say less: each use counts 1 when it
happens and half of what it did after every half-life. The decayed count w estimates the rate as w ln(2) / half-life (a
kernel estimate with an exponential kernel), and the probability of at least one use within the horizon is
1 - exp(-rate * horizon).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstrata.cost.bounds import require_finite
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["ReuseModel", "ValueTerms", "capacity_cost_s", "layerwise_resume_s"]


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """The terms of V(c, j), all in seconds of service but the probability.

    reuse_probability: p_c, from 0 to 1. recompute_s: model time that computes the rows again. promote_s: time that
    brings them back from the tier. capacity_s: what the room costs, see `capacity_cost_s`. write_s: what storing costs,
    0 for a chunk that is stored already.
    Errors: `ConfigurationError` for a term that is negative or not finite.
    """

    reuse_probability: float
    recompute_s: float
    promote_s: float
    capacity_s: float = 0.0
    write_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("reuse_probability", "recompute_s", "promote_s", "capacity_s", "write_s"):
            require_finite(f"ValueTerms.{field}", getattr(self, field))
        if self.reuse_probability > 1:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"ValueTerms.reuse_probability={self.reuse_probability} must be at most 1"
            )

    @property
    def discard_cost_s(self) -> float:
        """Expected seconds when the chunk is not kept."""
        return self.reuse_probability * self.recompute_s

    @property
    def keep_cost_s(self) -> float:
        """Expected seconds when the chunk is kept."""
        return self.reuse_probability * self.promote_s + self.capacity_s + self.write_s

    @property
    def value_s(self) -> float:
        """V: expected seconds that keeping the chunk saves; negative when it costs more than it saves."""
        return self.discard_cost_s - self.keep_cost_s


@dataclass(frozen=True, slots=True)
class ReuseModel:
    """How likely a chunk is used again, from its uses and the time since the latest of them.

    half_life_s: seconds after which a use counts half. horizon_s: how far ahead the probability looks.
    Errors: `ConfigurationError` unless both are finite and positive.
    """

    half_life_s: float = 3600.0
    horizon_s: float = 3600.0

    def __post_init__(self) -> None:
        require_finite("ReuseModel.half_life_s", self.half_life_s, above=True)
        require_finite("ReuseModel.horizon_s", self.horizon_s, above=True)

    def decayed(self, weight: float, age_s: float) -> float:
        """What a decayed count of `weight` is `age_s` seconds later."""
        return weight * math.exp2(-age_s / self.half_life_s)

    def rate_per_s(self, weight: float, age_s: float) -> float:
        """Estimated uses per second, `age_s` seconds after the decayed count was `weight`."""
        return self.decayed(weight, age_s) * math.log(2) / self.half_life_s

    def probability(self, uses: float, age_s: float) -> float:
        """Probability of at least one use within the horizon.

        uses: the decayed count at the latest use; a plain count, as though all uses had come then, is its upper bound.
        age_s: seconds since the latest use. Errors: `ConfigurationError` for a negative value.
        """
        require_finite("uses", uses)
        require_finite("age_s", age_s)
        return -math.expm1(-self.rate_per_s(uses, age_s) * self.horizon_s)


def capacity_cost_s(nbytes: int, held_s: float, price_s_per_gib_s: float) -> float:
    """C_capacity: seconds that `nbytes`, held for `held_s` seconds, cost everybody else.

    price_s_per_gib_s: seconds of service that a GiB saves in one second when something else has it; 0 in a tier that is
    not full. Errors: `ConfigurationError` for a negative value.
    """
    require_finite("nbytes", nbytes)
    require_finite("held_s", held_s)
    require_finite("price_s_per_gib_s", price_s_per_gib_s)
    return nbytes / 2**30 * held_s * price_s_per_gib_s


def layerwise_resume_s(layers: int, load_s: float, compute_s: float) -> float:
    """Seconds until the last of `layers` equal layers has computed, when layer l computes once it has arrived.

    load_s, compute_s: of one layer. Layers arrive one after the other and compute one after the other, so the longer of
    the two decides (layerwise preloading; Gao et al. 2024, CachedAttention, arXiv 2403.19708).
    Errors: `ConfigurationError` for a value that cannot be.
    """
    require_finite("layers", layers, least=1)
    require_finite("load_s", load_s)
    require_finite("compute_s", compute_s)
    return load_s + (layers - 1) * max(load_s, compute_s) + compute_s
