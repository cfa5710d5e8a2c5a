"""Sampled steps of a live request, held against dense attention: what a selection costs, and what calibrates a gate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kvstrata.contract.selection_receipts import ShadowSample
from kvstrata.cost.downstream import DownstreamMap, MappedError
from kvstrata.methods.calibrating import CalibrationSample
from kvstrata.methods.calibration import budget_key
from kvstrata.methods.interface import Index, Method, StepRows, require_at_least
from kvstrata.methods.selection import Selection
from kvstrata.placement.expansion import Support
from kvstrata.placement.head_report import report_worst_head
from kvstrata.placement.method_context import FrameContext
from kvstrata.placement.selection_log import greatest_estimate
from kvstrata.placement.shadow import DenseReference
from kvstrata.placement.shadow_fixture import retrieval_fixture, write_fixture
from kvstrata.placement.shadow_ledgers import measure_ledgers
from kvstrata.placement.support_attention import ChosenRows
from kvstrata.placement.support_report import SupportReport

__all__ = ["LiveShadow"]


class LiveShadow:
    """Every `every`-th position, in `layers` (all of them unless given), dense attention runs beside a selection.

    It reads every legal row of such a layer, so sampled steps cost what exact ones cost, and more. The answer stays the
    method's. One shadow may watch several sequences. dump: a folder for the samples of steps of one row as files, from
    which `read_fixture` computes the measures again; their names begin with the sample's number. downstream: from layer
    and query head to a declared linear map behind that head, e.g. its columns of the output projection.

    Attributes:
        samples: for `calibrate`. results: (position, layer, measures), in order. reports: (position, layer, report) of
        the query head that left out most, where rows entered as they are; see `report_worst_head`. mapped: (position,
        layer, what becomes of that head's error behind the declared map).
    """

    def __init__(
        self,
        every: int = 16,
        layers: Sequence[int] | None = None,
        dump: Path | None = None,
        downstream: Callable[[int, int], DownstreamMap] | None = None,
    ) -> None:
        require_at_least("LiveShadow.every", every, 1)
        self.every = every
        self.layers = None if layers is None else frozenset(layers)
        self.dump = dump
        self.samples: list[CalibrationSample] = []
        self.results: list[tuple[int, int, ShadowSample]] = []
        self.reports: list[tuple[int, int, SupportReport]] = []
        self.mapped: list[tuple[int, int, MappedError]] = []
        self._downstream = downstream

    def wants(self, layer: int, position: int) -> bool:
        """Whether this layer of the step at `position` is sampled."""
        return position % self.every == 0 and (self.layers is None or layer in self.layers)

    def compare(
        self,
        method: Method[Any],
        index: Index,
        context: FrameContext,
        layer: int,
        rows: StepRows,
        dense: tuple[Tensor, Tensor],
        sinks: Tensor | None,
        selection: Selection,
        support: Support,
        output: Tensor,
        parts: Sequence[ChosenRows],
        resident: Collection[int] = (),
    ) -> ShadowSample:
        """Measure one layer. context: of the selection, with the budget that it was made under, widened or not. dense:
        all K, V [kv_heads, visible, head_dim]. output: [rows, query_heads, head_dim]. parts: the rows that entered
        beside the persistent ones, as they were gathered. resident: rows that the device held before the choice.

        Errors: `RetrievalError` when the index, the selection or its measures contradict each other.
        """
        geometry, contract = context.geometry, method.contract
        reference = DenseReference.of(rows.queries, *dense, geometry.scale, sinks)
        answer = output.transpose(0, 1)
        moved = selection.repositioned is not None and rows.queries.shape[1] > 1
        recent = context.persistent.recent if moved else None
        measures = reference.measure(support, answer, recent)
        means = measures.means()
        sample = ShadowSample(
            means["recall"],
            means["omitted"],
            float(measures.omitted.max()),
            means["error"],
            means["relative_error"],
            means["dense_norm"],
            means["bound"],
            measure_ledgers(reference, dense, selection, support, parts, measures, answer, contract.answer),
        )
        report = report_worst_head(method, index, geometry, rows, dense, selection, support, measures, resident)
        if report is not None:
            self.reports.append((rows.start, layer, report))
        if self._downstream is not None:
            head = int(measures.omitted[:, -1].argmax())
            error = (answer[head, -1].double() - reference.output[head, -1]).cpu().numpy()
            self.mapped.append((rows.start, layer, self._downstream(layer, head).apply(error)))
        estimate = greatest_estimate(selection)
        budget = budget_key(context.budget)
        self.samples.append(CalibrationSample(estimate, min(1.0, max(0.0, sample.most_omitted)), budget, layer))
        self.results.append((rows.start, layer, sample))
        if self.dump is not None and rows.queries.shape[1] == 1:
            fixture = retrieval_fixture(
                reference,
                support,
                answer,
                measures,
                method=contract.name,
                layer=layer,
                position=rows.start,
                candidates=selection.candidates,
            )
            self.dump.mkdir(parents=True, exist_ok=True)
            name = f"{len(self.results):06d}-{contract.name}-layer{layer}-position{rows.start}.json"
            write_fixture(self.dump / name, fixture)
        return sample
