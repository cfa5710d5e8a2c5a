"""Wrong inputs of the topic: one field of a live object is changed, and the public call that takes it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvstrata.contract.identity import Namespace
from kvstrata.contract.method import AnswerClass
from kvstrata.cost.downstream import DownstreamMap
from kvstrata.cost.prepublication import EstimateSource, Outcome, Phase
from kvstrata.cost.unit_ledger import ByteLedger, ChargedPer
from kvstrata.lab.conform.error_cost_methods import MembersIndex
from kvstrata.lab.conform.error_cost_scene import ErrorCostScene
from kvstrata.placement.expansion import Support

__all__ = ["MUTATIONS", "Mutation"]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change. field: as in the topic's data. provoke: makes the change and the call, which must refuse."""

    field: str
    provoke: Callable[[ErrorCostScene], object]


def _lookup(**changes: Callable[[Any], Any]) -> Callable[[ErrorCostScene], object]:
    """Change the receipt of the look-up, and gather with it."""

    def provoke(scene: ErrorCostScene) -> object:
        found = scene.history.lookup
        scene.history.lookup = replace(found, **{name: of(getattr(found, name)) for name, of in changes.items()})
        return scene.history.gather_rows()

    return provoke


def _operation(**changes: Callable[[Any], Any]) -> Callable[[ErrorCostScene], object]:
    """Change what is asked, and look it up."""

    def provoke(scene: ErrorCostScene) -> object:
        asked = scene.history.operation
        scene.history.operation = replace(asked, **{name: of(getattr(asked, name)) for name, of in changes.items()})
        return scene.history.look_up()

    return provoke


def _tenant(scene: ErrorCostScene) -> object:
    manifest = scene.history.manifest
    scene.history.manifest = replace(manifest, source=replace(manifest.source, tenant=Namespace("another")))
    return scene.history.look_up()


def _part(part: str, **changes: Callable[[Any], Any]) -> Callable[[ErrorCostScene], object]:
    """Change fields of a part of the scene, and report a selection with it."""

    def provoke(scene: ErrorCostScene) -> object:
        live = getattr(scene, part)
        setattr(scene, part, replace(live, **{name: of(getattr(live, name)) for name, of in changes.items()}))
        return scene.report("row")

    return provoke


def _infinite(keys: Any) -> Any:
    changed = np.array(keys)
    changed[3][0] = np.inf
    return changed


def _downstream(change: Callable[[DownstreamMap], DownstreamMap]) -> Callable[[ErrorCostScene], object]:
    def provoke(scene: ErrorCostScene) -> object:
        return change(scene.downstream).apply([0.0] * scene.geometry.head_dim)

    return provoke


def _ledger(change: Callable[[ByteLedger], ByteLedger]) -> Callable[[ErrorCostScene], object]:
    return lambda scene: scene.admit(change(scene.report("row").ledger))


def _collapse(ledger: ByteLedger) -> ByteLedger:
    return replace(ledger, probe_bytes=0, support_bytes=ledger.support_bytes + ledger.probe_bytes)


def _members(name: str, change: Callable[[list[list[int]]], list[list[int]]]) -> Callable[[ErrorCostScene], object]:
    """Build the index of a method over other members."""

    def provoke(scene: ErrorCostScene) -> object:
        live = scene.methods[name]
        members = change([list(rows) for rows in live.method.members])
        live.index, live.units = MembersIndex(members, live.index.frontier), len(members)
        live.selection, live.candidates = replace(live.selection, units=torch.tensor([[0]])), (0,)
        return scene.report(name)

    return provoke


def _method(name: str, **changes: Any) -> Callable[[ErrorCostScene], object]:
    def provoke(scene: ErrorCostScene) -> object:
        for field, value in changes.items():
            setattr(scene.methods[name], field, value)
        return scene.report(name)

    return provoke


def _select(units: list[int]) -> Callable[[ErrorCostScene], object]:
    def provoke(scene: ErrorCostScene) -> object:
        live = scene.methods["row"]
        live.selection = replace(live.selection, units=torch.tensor([units]))
        return scene.report("row")

    return provoke


def _without_row_3(support: Support) -> Support:
    kept = support.rows[0] != 3
    return replace(support, rows=support.rows[:, kept], columns=support.columns[:, kept])


def _with_row_0(support: Support) -> Support:
    more = support.rows.new_zeros(1, 1)
    return replace(support, rows=torch.cat([more, support.rows], 1), columns=torch.cat([more, support.columns], 1))


def _expansion(name: str, **changes: Any) -> Callable[[ErrorCostScene], object]:
    return lambda scene: replace(scene.report(name).expansion, **changes)


def _error(**changes: Any) -> Callable[[ErrorCostScene], object]:
    return lambda scene: replace(scene.report("row").error, **changes)


def _decision(name: str, **changes: Any) -> Callable[[ErrorCostScene], object]:
    return lambda scene: replace(scene.decisions[name], **changes)


def _state(name: str, **changes: Any) -> Callable[[ErrorCostScene], object]:
    """Change what a decision rests on, and leave the decision."""
    return lambda scene: replace(scene.decisions[name], state=replace(scene.decisions[name].state, **changes))


def _thresholds(**changes: Any) -> Callable[[ErrorCostScene], object]:
    return lambda scene: replace(scene.decisions["accept"].thresholds, **changes)


MUTATIONS = (
    Mutation("operation.request_generation", _operation(request_generation=lambda n: n - 1)),
    Mutation("lookup.source_cache_generation", _lookup(source_cache_generation=lambda n: n - 1)),
    Mutation("lookup.index_generation", _lookup(index_generation=lambda n: n - 1)),
    Mutation("lookup.query", _lookup(query=lambda _: "0" * 64)),
    Mutation("lookup.layer", _lookup(layer=lambda n: n + 1)),
    Mutation("operation.kv_head", _operation(kv_head=lambda n: n + 1)),
    Mutation("source.tenant", _tenant),
    Mutation("reference.keys", _part("reference", keys=lambda keys: keys[:7])),
    Mutation("reference.values", _part("reference", values=lambda values: np.pad(values, ((0, 0), (0, 1))))),
    Mutation("reference.query", _part("reference", query=lambda query: np.pad(query, (0, 1)))),
    Mutation("reference.scale", _part("reference", scale=lambda _: 1.0)),
    Mutation("reference.keys[3][0]", _part("reference", keys=_infinite)),
    Mutation("answer.probabilities", _part("answer", probabilities=lambda p: tuple(0.98 * x for x in p))),
    Mutation("answer.top_rows", _part("answer", top_rows=lambda _: (2, 3, 5))),
    Mutation("answer.value_bound", _part("answer", value_bound=lambda _: 1.25)),
    Mutation(
        "downstream.matrix",
        _downstream(lambda live: DownstreamMap.of([[*row, 0.0] for row in live.matrix])),
    ),
    Mutation("downstream.norm", _downstream(lambda live: replace(live, norm=1.4))),
    Mutation("costs.itemsize", _part("costs", itemsize=lambda _: 0)),
    Mutation("costs.row_bytes", _part("costs", row_bytes=lambda n: n // 2)),
    Mutation("ledger.descriptor_per", _ledger(lambda ledger: replace(ledger, descriptor_per=ChargedPer.ROW))),
    Mutation("costs.candidate_bytes", _part("costs", candidate_bytes=lambda n: -n)),
    Mutation("ledger.probe_bytes", _ledger(_collapse)),
    Mutation("ledger.setup_bytes", _ledger(lambda ledger: replace(ledger, setup_bytes=None))),
    Mutation("page.size", _members("page", lambda _: [[0, 1, 2], [3, 4, 5], [6, 7, 8]])),
    Mutation("page[1].rows", _method("page", change_support=_without_row_3)),
    Mutation("cluster.members", _members("cluster", lambda rows: [rows[0], [*rows[1], 5], rows[2]])),
    Mutation("cluster.members[2]", _members("cluster", lambda rows: [rows[0], rows[1], rows[2][:-1]])),
    Mutation("row.selected", _select([2, 4])),
    Mutation("row.candidates", _method("row", candidates=(2, 6, 9))),
    Mutation("row.candidates[2]", _method("row", candidates=(2, 6, 2))),
    Mutation("page.candidate_recall", lambda scene: replace(scene.report("page"), candidate_recall=0.5)),
    Mutation("row.persistent", _expansion("row", persistent=(0, 8))),
    Mutation("cluster.support", _method("cluster", change_support=_with_row_0)),
    Mutation("row.resident", _method("row", resident=(0, 11))),
    Mutation("ledger.transfer_bytes", _ledger(lambda ledger: replace(ledger, transfer_bytes=ledger.support_bytes))),
    Mutation("error.retained", _error(retained=0.7)),
    Mutation("error.error", _error(error=1.5, relative=None)),
    Mutation("error.dense_norm", _error(dense_norm=None)),
    Mutation("estimate.source", _state("accept", source=EstimateSource.DENSE_REFERENCE)),
    Mutation("gate.max_estimated_omitted_mass", _thresholds(max_estimated_omitted_mass=1.2)),
    Mutation("gate.min_confidence", _thresholds(min_confidence=-0.1)),
    Mutation("accept.answer", _decision("accept", answer=AnswerClass.EXACT)),
    Mutation(
        "fetch.outcome",
        _decision("fetch", outcome=Outcome.DECLARED_DEGRADATION, answer=AnswerClass.APPROXIMATE),
    ),
    Mutation("widen.phase", _state("widen", phase=Phase.POST_WIDEN)),
    Mutation("postpone.retry_window_ms", _state("postpone", retry_window_ms=3.0)),
    Mutation("postpone.published", _decision("postpone", published=True)),
    Mutation("refuse.outcome", _decision("refuse", outcome="use_arrived_rows")),
)
"""In the order of the topic's data."""
