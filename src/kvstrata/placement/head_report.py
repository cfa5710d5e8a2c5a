"""One query head of a sampled step, as a record that is checked: its sets, masses, error and bytes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from kvstrata.cost.dense_reference import DenseAnswer, HeadReference
from kvstrata.cost.unit_ledger import UnitCosts
from kvstrata.methods.interface import Geometry, Index, Method, StepRows
from kvstrata.methods.selection import Selection
from kvstrata.placement.expansion import Support
from kvstrata.placement.shadow import ShadowMeasures
from kvstrata.placement.support_report import SupportReport, expansion_of, report_support
from kvstrata.placement.unit_partition import require_partition

__all__ = ["report_worst_head"]

_DESCRIPTOR_BYTES = 8
"""Of the number by which a unit is named."""


def report_worst_head(
    method: Method[Any],
    index: Index,
    geometry: Geometry,
    rows: StepRows,
    dense: tuple[Tensor, Tensor],
    selection: Selection,
    support: Support,
    measures: ShadowMeasures,
    resident: Collection[int],
) -> SupportReport | None:
    """The report of the query head that left out most, after every unit of the index was found to be in its place.

    dense: K and V [kv_heads, visible, head_dim]. resident: rows that the device held before the choice. The ledger
    charges a candidate its share of the index. `None` where the rows entered otherwise than as they are: in steps of
    several rows, with learned sinks, under a log-bias or a correction, or turned to other positions.

    Errors: `RetrievalError` of the first check that fails: the method, or the frame, is wrong then.
    """
    units, start, stop = method.unit_span(index)
    require_partition(method, index, units, start=start, stop=stop)
    plain = selection.log_bias is None and selection.correction is None and selection.repositioned is None
    if not plain or geometry.sinks or rows.queries.shape[1] != 1:
        return None
    head = int(measures.omitted[:, 0].argmax())
    owner = head * support.rows.shape[0] // geometry.query_heads
    keys, values = (plane[head // geometry.group].double().cpu().numpy() for plane in dense)
    query = rows.queries[head, 0].double().cpu().numpy()
    expansion = expansion_of(
        method, index, selection, support, units=units, candidates=range(units), resident=resident, owner=owner
    )
    reference = HeadReference.of(query, keys, values, geometry.scale)
    costs = UnitCosts.of(
        geometry.head_dim,
        dense[0].element_size(),
        candidate_bytes=index.nbytes // max(1, units * geometry.kv_heads),
        descriptor_bytes=_DESCRIPTOR_BYTES,
    )
    return report_support(expansion, geometry, reference, DenseAnswer.of(reference, len(expansion.support)), costs)
