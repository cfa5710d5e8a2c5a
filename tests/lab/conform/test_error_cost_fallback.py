"""The topic agrees with what was published, and fails as soon as any one validator of the product is gone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from kvstrata.lab.conform import run_topics
from kvstrata.lab.conform.error_cost_mutations import MUTATIONS
from kvstrata.lab.conform.error_cost_scene import ErrorCostScene
from kvstrata.lab.conform.result import load_topic

TOPIC = "error-cost-fallback"
topic_module: Any = import_module("kvstrata.lab.conform.error_cost_fallback")

CHECKS = {
    ("contract.unit_expansion", "EXPANSION"): {
        "candidates_indexed": "row.candidates",
        "candidates_distinct": "row.candidates[2]",
        "selected_are_candidates": "row.selected",
        "persistent_in_history": "row.persistent",
        "resident_in_history": "row.resident",
        "support_distinct": "cluster.support",
        "support_follows": "page[1].rows",
    },
    ("cost.dense_reference", "ANSWER"): {
        "normalised": "answer.probabilities",
        "top_rows": "answer.top_rows",
        "value_bound": "answer.value_bound",
    },
    ("cost.support_error", "SUPPORT_ERROR"): {
        "mass_ledger": "error.retained",
        "local_bound": "error.error",
        "denominator": "error.dense_norm",
    },
    ("cost.unit_ledger", "BYTE_LEDGER"): {
        "lines_present": "ledger.setup_bytes",
        "lines_apart": "ledger.probe_bytes",
        "descriptor_unit": "ledger.descriptor_per",
        "transfer_lines": "ledger.transfer_bytes",
    },
    ("placement.unit_partition", "PARTITION"): {
        "rows_indexed": "page.size",
        "no_overlap": "cluster.members",
        "no_gap": "cluster.members[2]",
    },
    ("placement.support_report", "REPORT"): {"candidate_namespace": "page.candidate_recall"},
    ("cost.prepublication_record", "DECISION"): {
        "outcome_follows": "refuse.outcome",
        "exact_stays_exact": "fetch.outcome",
        "widened_once": "widen.phase",
        "retry_in_time": "postpone.retry_window_ms",
        "label": "accept.answer",
        "unfinished": "postpone.published",
    },
    ("store.retrieval.retrieval", "LOOKUP"): {
        "operation_request": "operation.request_generation",
        "operation_heads": "operation.kv_head",
        "source_tenant": "source.tenant",
    },
    ("store.retrieval.retrieval", "GATHER"): {
        "lookup_cache": "lookup.source_cache_generation",
        "lookup_index": "lookup.index_generation",
        "lookup_query": "lookup.query",
        "lookup_layer": "lookup.layer",
    },
}
"""Checks by where they are listed, and the wrong input that each refuses."""

FUNCTIONS: list[tuple[str, str, Any, set[str]]] = [
    (
        "cost.dense_reference",
        "_tensor",
        lambda name, value, shape: np.nan_to_num(np.resize(value, shape), posinf=0.0),
        {"reference.keys", "reference.values", "reference.query", "reference.keys[3][0]"},
    ),
    ("placement.support_report", "require_reference", lambda *_: None, {"reference.scale"}),
    ("cost.unit_ledger", "_require_whole", lambda *_: None, {"costs.itemsize", "costs.candidate_bytes"}),
    ("cost.prepublication", "require_online", lambda _: None, {"estimate.source"}),
    (
        "cost.prepublication",
        "_require_share",
        lambda *_: None,
        {"gate.max_estimated_omitted_mass", "gate.min_confidence"},
    ),
    ("cost.downstream", "matrix_norm", lambda *_: 1.0, {"downstream.norm"}),
]


def _failed() -> dict[str, str]:
    (topic,) = run_topics([TOPIC]).topics
    assert not topic.ok
    return {item["field"]: item["found"] for item in topic.refusals.failed}


def test_every_figure_agrees_and_every_wrong_input_is_refused() -> None:
    report = run_topics([TOPIC])
    assert report.ok
    (topic,) = report.to_json()["topics"]
    assert {figure["key"] for figure in topic["figures"] if figure["ok"] is not True} == {"tables"}
    assert len(topic["figures"]) == 21
    assert topic["refusals"] == {"expected": 47, "refused": 47, "failed": []}


def test_every_wrong_input_of_the_data_is_provoked_once() -> None:
    assert [mutation.field for mutation in MUTATIONS] == [item["field"] for item in load_topic(TOPIC)["refusals"]]


def test_every_wrong_input_is_named_by_exactly_one_validator() -> None:
    by_check = [field for checks in CHECKS.values() for field in checks.values()]
    by_function = [field for *_, fields in FUNCTIONS for field in fields]
    inside_records = ["costs.row_bytes", "downstream.matrix"]
    assert sorted(by_check + by_function + inside_records) == sorted(mutation.field for mutation in MUTATIONS)


@pytest.mark.parametrize(
    ("place", "check", "field"),
    [(place, check, field) for place, checks in CHECKS.items() for check, field in checks.items()],
)
def test_a_check_that_is_gone_fails_the_topic(
    place: tuple[str, str], check: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = import_module(f"kvstrata.{place[0]}")
    checks = getattr(module, place[1])
    assert check in {one.__name__ for one in checks}
    monkeypatch.setattr(module, place[1], tuple(one for one in checks if one.__name__ != check))
    assert field in _failed()


@pytest.mark.parametrize(("module_name", "name", "without", "fields"), FUNCTIONS, ids=[row[1] for row in FUNCTIONS])
def test_a_validator_that_is_gone_fails_the_topic(
    module_name: str, name: str, without: Any, fields: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module(f"kvstrata.{module_name}"), name, without)
    assert fields <= _failed().keys()


def test_validators_inside_records(monkeypatch: pytest.MonkeyPatch) -> None:
    costs: Any = import_module("kvstrata.cost.unit_ledger")
    monkeypatch.setattr(costs.UnitCosts, "__post_init__", lambda self: None)
    assert {"costs.row_bytes"} <= _failed().keys()
    monkeypatch.undo()
    downstream: Any = import_module("kvstrata.cost.downstream")
    apply = downstream.DownstreamMap.apply
    monkeypatch.setattr(
        downstream.DownstreamMap, "apply", lambda self, e: apply(self, np.resize(e, len(self.matrix[0])))
    )
    assert _failed().keys() == {"downstream.matrix"}


def test_another_input_gives_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_topic(TOPIC)
    data["fixture"]["V"][2] = [0.75, -0.5]
    data["refusals"] = []
    monkeypatch.setattr(topic_module, "load_topic", lambda name: data)
    differing = {figure.key for figure in topic_module.conform_error_cost_fallback().figures if not figure.ok}
    assert {"dense_output", "row", "page", "cluster", "row_widened"} <= differing
    assert "dense_weights" not in differing


def test_the_step_s_own_row_weighs_nothing() -> None:
    scene = ErrorCostScene(load_topic(TOPIC)["fixture"])
    dense = scene.attend([*range(8)])
    assert scene.attend([*range(9)]) == dense
