"""What a step that chose rows did, layer by layer: immutable records. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from kvstrata.contract.error_ledgers import ErrorLedgers
from kvstrata.contract.method import AnswerClass, ComputeSite, Mode, Owner, QueryVariant

__all__ = ["LayerOutcome", "LayerSelection", "SelectionReceipt", "ShadowSample", "StageTimes"]


class LayerOutcome(StrEnum):
    """How a layer came to its rows.

    SELECTED: as the method chose. WIDENED: with the wider budget that was tried once. DEGRADED: the estimate passed the
    gate's limit and no exact path met the deadline; the caller allows that. The others read every legal row: DENSE by
    policy, PREFILL because the step has several rows or computes rows again, SHORT because the history is or the budget
    allows less of it than the persistent rows, COVERED because the budget covers it, BUILDING while the index was made,
    CAP because the cap's fallback says so, GATE because the gate asked for it, MISSING without the evidence that the
    method needs.
    """

    SELECTED = "selected"
    WIDENED = "widened"
    DEGRADED = "degraded"
    DENSE = "dense"
    PREFILL = "prefill"
    SHORT = "short"
    COVERED = "covered"
    BUILDING = "building"
    CAP = "cap"
    GATE = "gate"
    MISSING = "missing"

    @property
    def exact(self) -> bool:
        """Whether every legal row entered attention."""
        return self not in (LayerOutcome.SELECTED, LayerOutcome.WIDENED, LayerOutcome.DEGRADED)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one layer's stages. speculate: for this layer, spent in the layer before it. fetch: waiting for rows
    that were not there, the exposed part only."""

    append: float = 0.0
    build: float = 0.0
    speculate: float = 0.0
    select: float = 0.0
    fetch: float = 0.0
    gather: float = 0.0
    attend: float = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        pairs = zip(self._values(), other._values(), strict=True)
        return StageTimes(*(mine + theirs for mine, theirs in pairs))

    def _values(self) -> tuple[float, ...]:
        return self.append, self.build, self.speculate, self.select, self.fetch, self.gather, self.attend


@dataclass(frozen=True, slots=True)
class ShadowSample:
    """A layer's answer held against dense attention over every legal row; means over query heads and rows.

    recall: share of as many rows of the highest dense weight that entered. omitted, most_omitted: dense weight of the
    rows left out, its mean and its greatest over the heads. error, relative_error: length of the difference of the
    outputs, and that over dense_norm. bound: 2 * omitted * V_max. ledgers: the errors apart.
    """

    recall: float
    omitted: float
    most_omitted: float
    error: float
    relative_error: float
    dense_norm: float
    bound: float
    ledgers: ErrorLedgers


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """One layer of one sequence in one step.

    candidates: units that were scored for each owner. named: rows that the chosen units name, over all owners, and
    duplicates those of them that were dropped. The four states of legal rows, over all owners: visible entered
    attention; selected_not_ready did too, after a wait; preserved_not_resident have their only valid copies below the
    device; recoverable_not_selected were left out. chosen_bytes: K and V of the rows that entered. read_bytes: what was
    brought from each tier for them, by name. near_bytes: rows that were reduced where they lay. index_bytes: the
    layer's index after the step. estimate: greatest share of the mass that the method believes to have left out, over
    query heads; `None` without one. shadow: where this step was sampled. detail: what the method says of itself.
    """

    layer: int
    outcome: LayerOutcome
    owner: Owner
    owners: int
    variant: QueryVariant = QueryVariant.ACTUAL
    site: ComputeSite = ComputeSite.GATHER
    candidates: int = 0
    named: int = 0
    duplicates: int = 0
    visible: int = 0
    selected_not_ready: int = 0
    preserved_not_resident: int = 0
    recoverable_not_selected: int = 0
    chosen_bytes: int = 0
    read_bytes: tuple[tuple[str, int], ...] = ()
    near_bytes: int = 0
    index_bytes: int = 0
    generation: int = 0
    estimate: float | None = None
    times: StageTimes = field(default_factory=StageTimes)
    shadow: ShadowSample | None = None
    detail: str = ""


@dataclass(frozen=True)
class SelectionReceipt:
    """What one step of one sequence left out, and what that cost.

    policy: hexadecimal digest of method, configuration, budget and frame settings. method, version, budget: in words.
    """

    policy: str
    method: str
    version: int
    budget: str
    mode: Mode
    answer: AnswerClass
    layers: tuple[LayerSelection, ...]

    @property
    def chose(self) -> bool:
        """Whether any layer left rows out."""
        return any(not layer.outcome.exact for layer in self.layers)

    @property
    def variants(self) -> frozenset[QueryVariant]:
        """Queries that chose or weighed rows."""
        return frozenset(layer.variant for layer in self.layers if not layer.outcome.exact)

    @property
    def read_bytes(self) -> dict[str, int]:
        """Bytes brought from each tier."""
        total: Counter[str] = Counter()
        for layer in self.layers:
            total.update(dict(layer.read_bytes))
        return dict(total)

    @property
    def read_amplification(self) -> float:
        """Bytes brought from other tiers over bytes of the rows that entered attention; 0 when nothing was brought."""
        chosen = sum(layer.chosen_bytes for layer in self.layers if not layer.outcome.exact)
        moved = sum(sum(dict(layer.read_bytes).values()) for layer in self.layers if not layer.outcome.exact)
        return moved / chosen if chosen else 0.0

    @property
    def index_bytes(self) -> int:
        """Bytes of all layers' indexes."""
        return sum(layer.index_bytes for layer in self.layers)

    @property
    def times(self) -> StageTimes:
        """Seconds of each stage over all layers."""
        total = StageTimes()
        for layer in self.layers:
            total += layer.times
        return total
