"""What makes rows searchable: a proxy derived from them, and an index built over it, each with its own generation.

index generation -> (selector, its generation) -> (cache generation, frontier, source digest)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstrata.contract.identity import Namespace
from kvstrata.contract.manifest.operation import Fallback

__all__ = ["Exactness", "IndexPublication", "Positions", "ResidentSet", "SelectorPublication", "contains"]

Positions = tuple[tuple[int, int], ...]
"""Half-open ranges of original positions, in order."""


def contains(ranges: Positions, position: int) -> bool:
    """Whether `position` lies in one of the ranges."""
    return any(start <= position < stop for start, stop in ranges)


class Exactness(StrEnum):
    """What scores of a proxy can promise about the rows that they leave out."""

    EXACT = "exact"
    BOUND = "bound"
    APPROXIMATE = "approximate"
    ESTIMATOR = "estimator"


@dataclass(frozen=True, slots=True)
class SelectorPublication:
    """A proxy snapshot, never a replica: rows cannot be recovered from it.

    source: source digest of the rows [start, stop) that it covers. basis: identity of the projection, codebook or
    channel choice. dtype, shape: of the proxy. revision: of the derivation.
    """

    selector_id: str
    generation: int
    source: str
    start: int
    stop: int
    basis: str
    dtype: str
    shape: tuple[int, ...]
    revision: str
    exactness: Exactness = Exactness.APPROXIMATE


@dataclass(frozen=True, slots=True)
class ResidentSet:
    """Rows that readers of an index add to every selection: positions [start, stop), to the frontier without a stop."""

    start: int
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class IndexPublication:
    """A search structure over one proxy snapshot.

    selector_id, selector_generation, source: the proxy it was built over. cache_generation, frontier: the rows that it
    may find. coordinates: what its entries count in. entries: the positions that it holds. resident, rest_fallback: how
    rows behind an older frontier are covered; with neither, the index must reach the committed frontier.
    """

    index_id: str
    generation: int
    selector_id: str
    selector_generation: int
    cache_generation: int
    frontier: int
    source: str
    coordinates: str
    entries: Positions
    tenant: Namespace
    resident: ResidentSet | None = None
    rest_fallback: Fallback | None = None

    def covers(self, frontier: int) -> bool:
        """Whether every row before `frontier` is either indexed or covered otherwise."""
        if self.frontier >= frontier or self.rest_fallback is not None:
            return True
        rest = self.resident
        return rest is not None and rest.start <= self.frontier and (rest.stop is None or rest.stop >= frontier)

    def may_return(self, position: int) -> bool:
        """Whether a look-up may name `position`: an entry, or one of the resident rows."""
        rest = self.resident
        extra = rest is not None and rest.start <= position and (rest.stop is None or position < rest.stop)
        return extra or contains(self.entries, position)
