"""One look-up of one query: what it asks, until when, and what happens when it is late."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstrata.errors import Reason

__all__ = ["Fallback", "FallbackDecision", "QueryOperation"]


class Fallback(StrEnum):
    """What a late or failed look-up turns into. To go on with the rows that have arrived is none of them.

    BROADEN_SEARCH: approximate, more look-up and fetch work. EXACT_PROMOTE: exact, once all legal rows are visible.
    RECOMPUTE: exact, under the same model and cache ABI. REJECT: no output is published.
    """

    BROADEN_SEARCH = "broaden_search"
    EXACT_PROMOTE = "exact_promote"
    RECOMPUTE = "recompute"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class QueryOperation:
    """One decode step of one query head.

    query, mask: hexadecimal digests of the query vector and of the mask's contract. kv_head: the head that owns the
    rows of `query_head`. deadline_s: by the clock named `clock_origin`; seconds of two origins are not comparable.
    """

    request_generation: int
    cache_generation: int
    manifest_generation: int
    decode_position: int
    layer: int
    query_head: int
    kv_head: int
    query: str
    mask: str
    deadline_s: float
    clock_origin: str
    fallback: Fallback


@dataclass(frozen=True, slots=True)
class FallbackDecision:
    """The operation did not end as asked: nothing of it was published, and `fallback` is what was declared for that.

    stage: `lookup` or `gather`. late_s: seconds past the deadline when it was seen. arrived: rows that had arrived, and
    are not used.
    """

    fallback: Fallback
    stage: str
    late_s: float
    arrived: int = 0
    reason: Reason = Reason.DEADLINE_PASSED
