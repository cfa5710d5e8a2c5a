"""Topic `error-cost-fallback`: what a selection leaves out, what it costs, and what is decided before publication."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstrata.cost.dense_reference import HeadReference
from kvstrata.cost.downstream import MapNorm, matrix_norm
from kvstrata.cost.prepublication import Outcome
from kvstrata.cost.support_error import conditional_outputs, margin_omitted_bound, masses
from kvstrata.errors import KvstrataError
from kvstrata.kernels.selected import selected_state, selected_weights
from kvstrata.lab.conform.error_cost_mutations import MUTATIONS
from kvstrata.lab.conform.error_cost_scene import ErrorCostScene, HistoryScene
from kvstrata.lab.conform.result import Refusals, TopicReport, compare, load_topic

__all__ = ["conform_error_cost_fallback"]


def conform_error_cost_fallback() -> TopicReport:
    """Run the derivations and the wrong inputs through the product. Takes about a second."""
    data = load_topic("error-cost-fallback")
    refusals = _refusals(data)
    computed = {**_derivations(data["fixture"]), "invalid_rejected": refusals.refused}
    return TopicReport("error-cost-fallback", compare(data["figures"], computed), refusals)


def _derivations(fixture: dict[str, Any]) -> dict[str, Any]:
    scene = ErrorCostScene(fixture)
    reference, history = scene.reference, fixture["geometry"]["positions"]
    halves = HistoryScene(fixture, dtype="float16")
    halves.finish_gather()
    page = scene.report("page")
    cluster = scene.support("cluster")
    outcomes = {name: str(decision.outcome) for name, decision in scene.decisions.items()}
    return {
        "threshold_margin_5_weight": _margin_weight(fixture["margin"]),
        "threshold_margin_5_mass_of_1000_rows": margin_omitted_bound(fixture["margin"], 1000),
        "page_expansion": len(page.expansion.expanded),
        "page_top_rows": [round(page.support_recall * fixture["top"]), fixture["top"]],
        "downstream_frobenius": matrix_norm(scene.downstream.matrix, MapNorm.FROBENIUS),
        "row_bytes": halves.gather.bytes // history,
        "outcomes": len(set(outcomes.values()) & set(Outcome)),
        "dense_weights": reference.probabilities.tolist(),
        "dense_output": scene.attend([*range(history + 1)]),
        "top_rows": list(reference.top_rows(fixture["top"])),
        "value_bound": reference.value_bound,
        **{name: _method(scene, name) for name in scene.methods},
        "mixture_identity": all(_mixture_holds(reference, scene.report(name).error.rows) for name in scene.methods),
        "cluster_row_once": scene.output(cluster),
        "cluster_row_twice": scene.attend([0, *range(cluster.sinks), *cluster.rows[0].tolist(), history]),
        "scenarios": outcomes,
    }


def _method(scene: ErrorCostScene, name: str) -> dict[str, Any]:
    report = scene.report(name)
    error, ledger = report.error, scene.admit(report.ledger, name)
    mapped = scene.downstream.apply(np.asarray(scene.output(scene.support(name))) - scene.reference.output)
    return {
        "rows": list(report.expansion.support),
        "candidate_recall": "none" if report.candidate_recall is None else report.candidate_recall,
        "support_recall": report.support_recall,
        "retained": error.retained,
        "omitted": error.omitted,
        "error": error.error,
        "relative": error.relative,
        "bound": error.bound,
        "mapped": mapped.error,
        "mapped_bound": mapped.bound,
        "support_bytes": ledger.support_bytes,
        "transfer_bytes": ledger.transfer_bytes,
        "candidate_bytes": ledger.candidate_bytes,
        "descriptor_bytes": ledger.descriptor_bytes,
        "unit_expansion": report.expansion.ratio,
    }


def _margin_weight(margin: float) -> float:
    """Weight of a row whose score is `margin` below the best one's, over that one's."""
    keys, values = torch.tensor([[[0.0], [-float(margin)]]]), torch.zeros(1, 2, 1)
    query = torch.ones(1, 1, 1)
    weights = selected_weights(query, keys, selected_state(query, keys, values, 1.0), 1.0)[0, 0]
    return float(weights[1] / weights[0])


def _mixture_holds(reference: HeadReference, rows: tuple[int, ...]) -> bool:
    """Whether the averages over both parts, mixed by their masses, are the dense output."""
    retained, omitted = masses(reference.probabilities, rows)
    kept, left = conditional_outputs(reference, rows)
    return bool(np.allclose(retained * kept + omitted * left, reference.output, atol=1e-12))


def _refusals(data: dict[str, Any]) -> Refusals:
    mutations = {mutation.field: mutation for mutation in MUTATIONS}
    failed = []
    for item in data["refusals"]:
        expected, found = f"{item['reason']} of {item['names']}", "accepted"
        try:
            mutations[item["field"]].provoke(ErrorCostScene(data["fixture"]))
        except KvstrataError as error:
            named = getattr(error, "field", "") or error.cause.split(" ", 1)[0]
            found = f"{error.reason} of {named}"
        if found != expected:
            failed.append({"field": item["field"], "expected": expected, "found": found})
    wanted = len(data["refusals"])
    return Refusals(wanted, wanted - len(failed), tuple(failed))
