"""Eight known rows in a live history, and one query over them whose selections are reported: the topic's fixture."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.contract.layout import SegmentLayout
from kvstrata.cost.dense_reference import DenseAnswer, HeadReference
from kvstrata.cost.downstream import DownstreamMap
from kvstrata.cost.prepublication import GateThresholds, Phase, PrepublicationState
from kvstrata.cost.prepublication_record import PrepublicationDecision
from kvstrata.cost.unit_ledger import ByteLedger, UnitCosts
from kvstrata.kernels.selected import selected_state
from kvstrata.kernels.state import PartialState
from kvstrata.lab.conform.error_cost_methods import METHODS, GivenUnits, MembersIndex
from kvstrata.lab.conform.manifest_scene import Scene
from kvstrata.methods.in_memory import InMemoryContext
from kvstrata.methods.interface import Geometry, StepRows
from kvstrata.methods.selection import Selection
from kvstrata.placement.expansion import Support, expand
from kvstrata.placement.support_report import SupportReport, expansion_of, report_support
from kvstrata.placement.unit_partition import require_partition
from kvstrata.store.retrieval.row_tiers import row_views

__all__ = ["ErrorCostScene", "HistoryScene", "MethodScene"]

_CODE = {"float32": "f", "float16": "e"}


class HistoryScene(Scene):
    """The store's part: the fixture's rows, committed, indexed and looked up. All rows are candidates."""

    def search(self, index: Any) -> list[tuple[int, float]]:
        """Every row, with its score."""
        query = torch.tensor(self.fixture["q"])
        return [(p, float(torch.tensor(self.fixture["K"][p]) @ query)) for p in index[0]]

    @property
    def state(self) -> PartialState:
        """(m, l, u) of the query over the gathered rows."""
        keys, values = self.rows()
        return PartialState.of_rows(
            torch.tensor([self.fixture["q"]]), keys, values, scale=len(self.fixture["q"]) ** -0.5
        )

    def rows(self) -> tuple[Tensor, Tensor]:
        """Gathered keys and values, [rows, head_dim]."""
        assert self.gathered is not None
        keys, values = (
            torch.frombuffer(bytearray(view), dtype=getattr(torch, self.dtype)).view(-1, self.gather.head_dim)
            for view in (self.gathered.keys, self.gathered.values)
        )
        return keys, values

    def _fill(self, segment: memoryview, layout: SegmentLayout, layer: int) -> None:
        for position in range(layout.chunk_tokens):
            planes = row_views(segment, layout, 0, position)
            for plane, name in zip(planes, ("K", "V"), strict=True):
                plane[:] = struct.pack(f"<{layout.head_dim}{_CODE[self.dtype]}", *self.fixture[name][position])


@dataclass
class MethodScene:
    """One way of selecting over the rows, up to its report. Fields may be changed by a test before `report`.

    change_support: applied to the rows that were expanded.
    """

    method: GivenUnits
    index: MembersIndex
    selection: Selection
    candidates: tuple[int, ...]
    persistent: Persistent
    units: int
    resident: tuple[int, ...]
    change_support: Callable[[Support], Support] = lambda support: support


@dataclass
class ErrorCostScene:
    """All of the fixture, live. Fields may be changed by a test."""

    fixture: dict[str, Any]
    history: HistoryScene = field(init=False)
    geometry: Geometry = field(init=False)
    reference: HeadReference = field(init=False)
    answer: DenseAnswer = field(init=False)
    costs: UnitCosts = field(init=False)
    downstream: DownstreamMap = field(init=False)
    methods: dict[str, MethodScene] = field(init=False)
    decisions: dict[str, PrepublicationDecision] = field(init=False)

    def __post_init__(self) -> None:
        fixture = self.fixture
        self.history = HistoryScene(fixture)
        self.history.finish_gather()
        shape, costs, answer = fixture["geometry"], fixture["costs"], fixture["dense_answer"]
        dim = shape["d_h"]
        self.geometry = Geometry(shape["layers"], shape["q_heads"], shape["kv_heads"], dim, dim**-0.5, (None,))
        keys, values = (rows.double().tolist() for rows in self.history.rows())
        self.reference = HeadReference.of(fixture["q"], keys, values, self.geometry.scale)
        self.answer = DenseAnswer(tuple(answer["probabilities"]), tuple(answer["top_rows"]), answer["value_bound"])
        self.costs = UnitCosts.of(
            dim,
            costs["itemsize"],
            candidate_bytes=costs["candidate_bytes"],
            descriptor_bytes=costs["descriptor_bytes"],
            setup_bytes=costs["setup_bytes"],
        )
        self.downstream = DownstreamMap(tuple(map(tuple, fixture["A"])), fixture["downstream_norm"])
        self.methods = {name: self._method(given) for name, given in fixture["methods"].items()}
        thresholds = GateThresholds(**fixture["gate"])
        self.decisions = {
            scenario["id"]: PrepublicationDecision.of(_state(scenario["state"]), thresholds)
            for scenario in fixture["scenarios"]
        }

    @property
    def probe_bytes(self) -> int:
        """What the search is said to read."""
        return int(self.fixture["costs"]["probe_bytes"])

    def support(self, name: str) -> Support:
        """The rows of one method's selection, expanded by the product; its index must cover every row once."""
        scene = self.methods[name]
        require_partition(scene.method, scene.index, scene.units)
        visible = scene.index.frontier + 1
        support = expand(scene.method, scene.index, scene.selection, self.geometry, scene.persistent, visible)
        return scene.change_support(support)

    def output(self, support: Support) -> list[float]:
        """Attention over the support, the step's own row among it, in fp32."""
        entered = [*range(support.sinks), *support.rows[0].tolist(), *range(support.recent, support.visible)]
        return self.attend(entered)

    def attend(self, rows: list[int]) -> list[float]:
        """Attention over `rows` of the history, and the step's own row after them, in fp32."""
        keys, values = self.all_rows()
        query = torch.tensor([[self.fixture["q"]]])
        state = selected_state(query, keys[rows].unsqueeze(0), values[rows].unsqueeze(0), self.geometry.scale)
        return [float(x) for x in state.output()[0, 0]]

    def all_rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the history and of the step's own row, whose weight is 0 in fp32."""
        own = self.fixture["own_row"]
        keys, values = self.history.rows()
        return torch.cat([keys, torch.tensor([own["key"]])]), torch.cat([values, torch.tensor([own["value"]])])

    def report(self, name: str) -> SupportReport:
        """The report of one method."""
        scene, support = self.methods[name], self.support(name)
        expansion = expansion_of(
            scene.method,
            scene.index,
            scene.selection,
            support,
            units=scene.units,
            candidates=scene.candidates,
            resident=scene.resident,
        )
        output = self.output(support)
        return report_support(
            expansion, self.geometry, self.reference, self.answer, self.costs, output, self.probe_bytes
        )

    def admit(self, ledger: ByteLedger, name: str = "row") -> ByteLedger:
        """Show a ledger to the selection that it is about."""
        return ledger.require(self.report(name).expansion, self.costs, self.probe_bytes)

    def _method(self, given: dict[str, Any]) -> MethodScene:
        kind = METHODS[given["unit"]]
        members, rows = given["members"], self.fixture["geometry"]["positions"]
        method = kind(tuple(map(tuple, members)), tuple(given["selected"]), len(given["candidates"]))
        persistent = Persistent(given["sinks"], 1)
        keys, values = (plane.unsqueeze(0) for plane in self.all_rows())
        ctx = InMemoryContext(self.geometry, {0: (keys, values)}, Rows(rows), persistent, rows + 1)
        index = method.build(ctx, 0, None)
        step = StepRows(rows, torch.tensor([[self.fixture["q"]]]), keys[:, rows:], values[:, rows:])
        return MethodScene(
            method,
            index,
            method.select(ctx, 0, index, step),
            tuple(given["candidates"]),
            persistent,
            len(members),
            tuple(self.fixture["resident"]),
        )


def _state(given: dict[str, Any]) -> PrepublicationState:
    return PrepublicationState(**{**given, "phase": Phase(given["phase"])})
