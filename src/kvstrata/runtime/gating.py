"""Whether a chunk is worth writing, and a session worth reading back: what the engine timed against what the store did.

Off unless it is asked for. It is never asked about a session that the user saves, nor about rows that memory has no
room for: those are written in any case.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import combinations

from kvstrata.contract.layout import SegmentLayout
from kvstrata.cost.retention import ReuseModel
from kvstrata.store.cost_gate import CostGate, CostGateConfig, RestoreDecision, StoreDecision, StoreVerdict
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.service_ledger import ServiceLedger

__all__ = ["Gating", "PrefillTimes"]

_LEAST_ROWS = 16
"""Shorter steps cost what a call costs, and say nothing about rows."""


class PrefillTimes:
    """`RecomputeCost` from timed steps: seconds a row as a line over its position, by the median of all slopes."""

    def __init__(self, window: int = 64) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=window)
        self._line: tuple[float, float] | None = None

    @property
    def observations(self) -> int:
        return len(self._samples)

    def record(self, start: int, rows: int, seconds: float) -> None:
        """A step computed `rows` rows from position `start` on in `seconds`. Steps of few rows are passed over."""
        if rows >= _LEAST_ROWS and seconds > 0:
            self._samples.append((start + rows / 2, seconds / rows))
            self._line = None

    def seconds(self, start: int, stop: int) -> float:
        if not self._samples:
            return 0.0
        if self._line is None:
            slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(self._samples, 2) if a[0] != b[0]]
            slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
            self._line = (statistics.median(cost - slope * place for place, cost in self._samples), slope)
        first, slope = self._line
        return max(0.0, (stop - start) * (first + slope * (start + stop) / 2))


class Gating:
    """The cost gate of one attached model. rates: of the store. times: of the engine. tier: of the durable replicas.

    reuse: how likely a chunk is asked for again. latest: the latest decision about a chunk. declined_bytes: rows of
    chunks that were not written when they were sealed.
    """

    def __init__(
        self,
        rates: ServiceLedger,
        times: PrefillTimes,
        layout: SegmentLayout,
        layers: int,
        tier: str,
        config: CostGateConfig | None = None,
        reuse: ReuseModel | None = None,
    ) -> None:
        self.latest: StoreDecision | None = None
        self.declined_bytes = 0
        self._gate = CostGate(rates.rates, times, config)
        self._reuse = reuse or ReuseModel(half_life_s=3600.0, horizon_s=3600.0)
        self._layout = layout
        self._layers = layers
        self._tier = tier

    def admits(self, record: ChunkRecord) -> bool:
        """Whether a chunk that has just been sealed is to be written now."""
        identity = record.identity
        nbytes = self._layers * self._layout.segment_bytes
        probability = self._reuse.probability(1, 0.0)
        self.latest = self._gate.store(self._tier, nbytes, identity.start, identity.stop, probability)
        if self.latest.verdict is StoreVerdict.STORE:
            return True
        self.declined_bytes += nbytes
        return False

    def restore(self, tokens: int) -> RestoreDecision:
        """Whether to read the first `tokens` rows of a session, at least one, or to compute them again."""
        nbytes = tokens * self._layers * self._layout.row_bytes
        return self._gate.restore(self._tier, nbytes, self._layers, 0, tokens)
