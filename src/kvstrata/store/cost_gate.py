"""Declines what is cheaper to compute again, when it would be stored and when it would be read back, and says so.

Storing is judged by V(c, j) of `cost/retention.py`, reading back by the time until the request can go on. The rates are
those that the store has measured, the time of computing is what the engine has timed. Until both rest on enough
observations nothing is declined: a store that starts by declining would never measure. For the same reason one of many
is let through that would be declined, as a probe: a disk that was slow for a minute is not avoided for ever.

The gate is for copies that may be missing. It is not asked about a session that the user saves, nor about the only copy
of rows that an open request still needs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.cost.bounds import require_finite
from kvstrata.cost.retention import ValueTerms, capacity_cost_s, layerwise_resume_s
from kvstrata.cost.service_rates import Direction, ServiceRates
from kvstrata.errors import Reason
from kvstrata.ports import RecomputeCost

__all__ = [
    "CostBasis",
    "CostGate",
    "CostGateConfig",
    "RestoreDecision",
    "RestoreVerdict",
    "StoreDecision",
    "StoreVerdict",
]


class CostBasis(StrEnum):
    """MEASURED: both sides rest on enough observations. UNMEASURED: they do not, so nothing was declined. PROBE: it
    would have been declined, and was let through so that the tier is measured again."""

    MEASURED = "measured"
    UNMEASURED = "unmeasured"
    PROBE = "probe"


class StoreVerdict(StrEnum):
    """Whether to write a chunk to a tier."""

    STORE = "store"
    DECLINE = "decline"


class RestoreVerdict(StrEnum):
    """How a request gets rows that a tier holds."""

    RESTORE = "restore"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """verdict, and what it rests on. terms: both costs and what they consist of, or `None` while UNMEASURED.

    reason: CHEAPER_TO_RECOMPUTE when it was declined, else `None`. detail: the same in words.
    """

    verdict: StoreVerdict
    basis: CostBasis
    terms: ValueTerms | None
    reason: Reason | None
    detail: str


@dataclass(frozen=True, slots=True)
class RestoreDecision:
    """verdict, and what it rests on. restore_s, recompute_s: seconds until the request can go on either way, 0 for what
    is UNMEASURED. reason, detail: as in `StoreDecision`.
    """

    verdict: RestoreVerdict
    basis: CostBasis
    restore_s: float
    recompute_s: float
    reason: Reason | None
    detail: str


@dataclass(frozen=True, slots=True)
class CostGateConfig:
    """least_observations: of each rate and of computing, before anything is declined. held_s: how long a chunk is taken
    to stay, for which room is charged. price_s_per_gib_s: what room costs, see `capacity_cost_s`. write_share: share of
    a write that keeps somebody waiting; 0 for writes that run while nothing else wants the tier. probe_every: of what
    would be declined of one tier, every how many-th is let through; 0 for none.
    Errors: `ConfigurationError` for a value that cannot be.
    """

    least_observations: int = 8
    held_s: float = 3600.0
    price_s_per_gib_s: float = 0.0
    write_share: float = 1.0
    probe_every: int = 32

    def __post_init__(self) -> None:
        require_finite("CostGateConfig.least_observations", self.least_observations, least=1)
        for field in ("held_s", "price_s_per_gib_s", "write_share", "probe_every"):
            require_finite(f"CostGateConfig.{field}", getattr(self, field))


class CostGate:
    """Decides from `rates()`, e.g. `ServiceLedger.rates`, and from the engine's `recompute`. Does not block. Safe for
    several threads, as far as those are."""

    def __init__(
        self, rates: Callable[[], ServiceRates], recompute: RecomputeCost, config: CostGateConfig | None = None
    ) -> None:
        self.config = config or CostGateConfig()
        self._rates = rates
        self._recompute = recompute
        self._lock = threading.Lock()
        self._declined: Counter[tuple[str, Direction]] = Counter()

    def store(self, tier: str, nbytes: int, start: int, stop: int, reuse_probability: float) -> StoreDecision:
        """Whether to write a chunk of `nbytes` bytes, tokens [start, stop) of its history, to `tier`.

        reuse_probability: from 0 to 1, e.g. of `ReuseModel`. A value of exactly 0 is declined: it saves nothing.
        Errors: `ConfigurationError` for a value that cannot be.
        """
        _require_work(nbytes, start, stop)
        least, rates = self.config.least_observations, self._rates()
        read = rates.get(tier, Direction.READ, least)
        write = rates.get(tier, Direction.WRITE, least)
        if read is None or write is None or self._recompute.observations < least:
            return StoreDecision(StoreVerdict.STORE, CostBasis.UNMEASURED, None, None, self._unmeasured(tier))
        terms = ValueTerms(
            reuse_probability,
            recompute_s=self._recompute.seconds(start, stop),
            promote_s=read.seconds(nbytes),
            capacity_s=capacity_cost_s(nbytes, self.config.held_s, self.config.price_s_per_gib_s),
            write_s=write.seconds(nbytes) * self.config.write_share,
        )
        said = (
            f"tokens [{start}, {stop}) in {tier}: keeping costs {_ms(terms.keep_cost_s)}, computing them again "
            f"{_ms(terms.discard_cost_s)}, at a probability of reuse of {terms.reuse_probability:.3g}"
        )
        if terms.value_s > 0:
            return StoreDecision(StoreVerdict.STORE, CostBasis.MEASURED, terms, None, said)
        if self._probes(tier, Direction.WRITE):
            return StoreDecision(StoreVerdict.STORE, CostBasis.PROBE, terms, None, said)
        return StoreDecision(StoreVerdict.DECLINE, CostBasis.MEASURED, terms, Reason.CHEAPER_TO_RECOMPUTE, said)

    def restore(
        self,
        tier: str,
        nbytes: int,
        layers: int,
        start: int,
        stop: int,
        *,
        lookup_s: float = 0.0,
        queue_s: float = 0.0,
        suffix_s: float = 0.0,
    ) -> RestoreDecision:
        """Whether to read `nbytes` bytes in `layers` equal layers, tokens [start, stop), from `tier`, or compute them.

        lookup_s: seconds that only reading spends before its first byte. queue_s: seconds that the request waits for
        its turn either way. suffix_s: time that computes the tokens after `stop`, which layers do as they arrive;
        computing everything takes it as well. A tie is for reading, which leaves the model to others.
        Errors: `ConfigurationError` for a value that cannot be.
        """
        _require_work(nbytes, start, stop)
        require_finite("layers", layers, least=1)
        require_finite("lookup_s", lookup_s)
        require_finite("queue_s", queue_s)
        require_finite("suffix_s", suffix_s)
        least = self.config.least_observations
        read = self._rates().get(tier, Direction.READ, least)
        if read is None or self._recompute.observations < least:
            said = self._unmeasured(tier)
            return RestoreDecision(RestoreVerdict.RESTORE, CostBasis.UNMEASURED, 0.0, 0.0, None, said)
        load_s = read.seconds(nbytes, layers) / layers
        restore_s = lookup_s + queue_s + layerwise_resume_s(layers, load_s, suffix_s / layers)
        recompute_s = queue_s + self._recompute.seconds(start, stop) + suffix_s
        said = f"tokens [{start}, {stop}) from {tier}: {_ms(restore_s)}, computed again: {_ms(recompute_s)}"
        verdict, basis, reason = RestoreVerdict.RESTORE, CostBasis.MEASURED, None
        if recompute_s < restore_s:
            if self._probes(tier, Direction.READ):
                basis = CostBasis.PROBE
            else:
                verdict, reason = RestoreVerdict.RECOMPUTE, Reason.CHEAPER_TO_RECOMPUTE
        return RestoreDecision(verdict, basis, restore_s, recompute_s, reason, said)

    def _probes(self, tier: str, direction: Direction) -> bool:
        """Count one that would be declined; whether it is let through."""
        if not self.config.probe_every:
            return False
        with self._lock:
            self._declined[tier, direction] += 1
            return self._declined[tier, direction] % self.config.probe_every == 0

    def _unmeasured(self, tier: str) -> str:
        return f"{tier} and computing are not measured yet: fewer than {self.config.least_observations} observations"


def _require_work(nbytes: int, start: int, stop: int) -> None:
    require_finite("nbytes", nbytes, least=1)
    require_finite("start", start)
    require_finite("stop", stop, least=start, above=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f} ms"
