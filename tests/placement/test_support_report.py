"""One selection, from units to masses and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvstrata.contract.method import Unit
from kvstrata.errors import Reason, RetrievalError
from kvstrata.lab.conform.error_cost_scene import ErrorCostScene
from kvstrata.lab.conform.result import load_topic
from kvstrata.methods.selection import NO_UNIT


@pytest.fixture(name="scene")
def _scene() -> ErrorCostScene:
    return ErrorCostScene(load_topic("error-cost-fallback")["fixture"])


def test_a_page_report(scene: ErrorCostScene) -> None:
    report = scene.report("page")
    assert (report.expansion.unit, report.expansion.selected) == (Unit.PAGE, (1, 3))
    assert report.expansion.support == (2, 3, 6, 7)
    assert (report.candidate_recall, report.support_recall) == (None, 1.0)
    assert (report.ledger.support_bytes, report.ledger.transfer_bytes) == (32, 24)


def test_rows_of_the_step_itself_are_no_history(scene: ErrorCostScene) -> None:
    support = scene.support("row")
    assert (support.recent, support.visible) == (8, 9)
    assert scene.report("row").expansion.support == (0, 2, 6)


def test_candidates_that_are_rows_have_a_recall(scene: ErrorCostScene) -> None:
    assert scene.report("row").candidate_recall == pytest.approx(2 / 3)
    assert scene.report("row_widened").candidate_recall == 1.0


def test_padding_is_no_unit(scene: ErrorCostScene) -> None:
    live = scene.methods["row"]
    live.selection = replace(live.selection, units=torch.tensor([[2, 6, NO_UNIT]]))
    assert scene.report("row").expansion.selected == (2, 6)


def test_a_recall_of_pages_is_refused(scene: ErrorCostScene) -> None:
    with pytest.raises(RetrievalError) as caught:
        replace(scene.report("page"), candidate_recall=1.0)
    assert caught.value.reason is Reason.RECALL_NAMESPACE_MISMATCH


def test_a_reference_of_another_scale_or_history_is_refused(scene: ErrorCostScene) -> None:
    reference = scene.reference
    scene.reference = replace(reference, scale=1.0)
    with pytest.raises(RetrievalError, match="score_scale_mismatch"):
        scene.report("row")
    scene.reference = replace(reference, keys=reference.keys[:7], values=reference.values[:7], visible=7)
    with pytest.raises(RetrievalError, match="geometry_mismatch"):
        scene.report("row")
