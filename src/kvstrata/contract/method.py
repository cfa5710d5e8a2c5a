"""What a method is: the choices that make one way of choosing rows different from another, as a record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "AnswerClass",
    "ComputeSite",
    "GroupSharing",
    "MethodContract",
    "Mode",
    "Owner",
    "QueryVariant",
    "Unit",
    "UpdatePhase",
]


class AnswerClass(StrEnum):
    """EXACT: every legal row enters attention. APPROXIMATE: a chosen part does. ESTIMATOR: a sample does, weighted by
    the inverse of its inclusion probability."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    ESTIMATOR = "estimator"


class Mode(StrEnum):
    """What the caller allows. EXACT takes no approximate method, no row of approximate lineage, and no query but the
    actual one."""

    EXACT = "exact"
    APPROXIMATE = "approximate"


class Owner(StrEnum):
    """Whose a selection is: rows chosen for each query head, for each K/V head, or for all heads of a layer."""

    QUERY_HEAD = "query_head"
    KV_HEAD = "kv_head"
    LAYER = "layer"


class GroupSharing(StrEnum):
    """How the query heads of one K/V head come to one selection.

    SEPARATE: they do not, each has its own. MAX, SUM, MEAN: of their scores. SOFTMAX_SUM: of their scores after a
    softmax each. QUERY_SUM: the queries are added before they are scored. QUERY_FREE: no query is looked at.
    """

    SEPARATE = "separate"
    MAX = "max"
    SUM = "sum"
    MEAN = "mean"
    SOFTMAX_SUM = "softmax_sum"
    QUERY_SUM = "query_sum"
    QUERY_FREE = "query_free"


class QueryVariant(StrEnum):
    """Which query chose and weighed the rows: the ACTUAL one, one turned to another position (REPOSITIONED), or one
    PREDICTED a layer ahead. Only ACTUAL may enter an exact receipt."""

    ACTUAL = "actual"
    REPOSITIONED = "repositioned"
    PREDICTED = "predicted"


class Unit(StrEnum):
    """What is ranked."""

    ROW = "row"
    PAGE = "page"
    BLOCK = "block"
    CLUSTER = "cluster"
    EVENT = "event"
    TABLE = "table"


class UpdatePhase(StrEnum):
    """When an index learns about new rows: with every ROW, when a PREFILL ends, or never (FIXED)."""

    ROW = "row"
    PREFILL = "prefill"
    FIXED = "fixed"


class ComputeSite(StrEnum):
    """Where the chosen rows are reduced: gathered to the device, or where they lie, with a partial state returned."""

    GATHER = "gather"
    NEAR_DATA = "near_data"


@dataclass(frozen=True)
class MethodContract:
    """One published method, told apart field by field.

    name, source: short name, and the paper with its section. version: of this implementation's policy; moves when the
    same configuration would choose other rows. answer: class of its answers. unit, representation, index: what is
    ranked, by which derived tensor, in which structure. owner, sharing: of its selections, unless configured otherwise.
    variant: the query that it uses. update, site: see there. append_equals_build: an index that grew row by row is the
    one built over the whole. rebuilds: an index can be built again from the rows alone, without the queries of their
    prefill. selects_in_prefill: prompts are read through selections too. needs_hidden: it looks at the residual stream.
    all_rows: what holds when the budget covers every row.
    """

    name: str
    source: str
    version: int
    answer: AnswerClass
    unit: Unit
    representation: str
    index: str
    owner: Owner
    sharing: GroupSharing
    update: UpdatePhase
    site: ComputeSite = ComputeSite.GATHER
    variant: QueryVariant = QueryVariant.ACTUAL
    append_equals_build: bool = True
    rebuilds: bool = True
    selects_in_prefill: bool = False
    needs_hidden: bool = False
    all_rows: str = "equals exact attention"
    fallback: str = "exact attention over every legal row"
    workload: str = "decode over one long history"
