"""What a step notes of its layers becomes its receipt, and no byte is counted for two of them."""

from __future__ import annotations

from typing import Any

import torch
from fixed_choice import FixedChoice
from selection_parts import Layer, choose_last, support_of

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.contract.method import AnswerClass, ComputeSite, Mode, Owner, QueryVariant
from kvstrata.contract.selection_receipts import LayerOutcome, StageTimes
from kvstrata.methods.interface import Index
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.placement.policy import SelectionPolicy
from kvstrata.placement.selection_log import SelectionLog, count_rows, greatest_estimate

LAYER = Layer.random(60)
METHOD = FixedChoice()
POLICY = SelectionPolicy(METHOD, Rows(16), Persistent(sinks=2, recent=3))
ROW_BYTES = 2 * 8 * 4


def make_log() -> SelectionLog:
    log = SelectionLog(POLICY, LAYER.geometry, ComputeSite.NEAR_DATA, ROW_BYTES)
    log.begin()
    return log


def note(log: SelectionLog, layer: int, outcome: LayerOutcome = LayerOutcome.SELECTED, **changes: Any) -> None:
    memory = LAYER.context(16, sinks=2, recent=3)
    index, selection = choose_last(METHOD, memory, LAYER)
    support = support_of(METHOD, index, selection, memory)
    given: dict[str, Any] = {
        "not_ready": 5,
        "not_resident": 7,
        "near_rows": 3,
        "times": StageTimes(select=1.0),
        "estimate": None,
    }
    log.chosen(layer, outcome, index, selection, support, **(given | changes))


def test_a_receipt_names_policy_method_and_budget() -> None:
    receipt = make_log().receipt()
    assert (receipt.policy, receipt.method, receipt.version) == (POLICY.digest, "fixed", 1)
    assert (receipt.budget, receipt.mode, receipt.answer) == (
        "Rows(rows=16)",
        Mode.APPROXIMATE,
        AnswerClass.APPROXIMATE,
    )
    assert receipt.layers == ()


def test_the_four_states_of_rows_and_their_bytes() -> None:
    log = make_log()
    log.charge([("files", 100), ("host", 10)])
    log.charge([("files", 1)])
    note(log, 1, estimate=0.25)
    (layer,) = log.receipt().layers
    # Of 59 rows each owner has every third, beside 2 sinks and the last 3.
    each = [len({row for row in range(59) if row % 3 == owner} | {0, 1, 57, 58, 59}) for owner in (0, 1)]
    assert (layer.owner, layer.owners) == (Owner.KV_HEAD, 2)
    assert layer.visible == sum(each)
    assert layer.visible + layer.recoverable_not_selected == 2 * 60
    assert (layer.selected_not_ready, layer.preserved_not_resident) == (5, 2 * 7)
    assert layer.chosen_bytes == layer.visible * ROW_BYTES
    assert layer.near_bytes == 3 * ROW_BYTES
    assert layer.read_bytes == (("files", 101), ("host", 10))
    assert (layer.estimate, layer.site, layer.variant) == (0.25, ComputeSite.NEAR_DATA, QueryVariant.ACTUAL)
    assert layer.duplicates == layer.named - (layer.visible - 2 * 5)


def test_an_exact_outcome_has_all_rows() -> None:
    log = make_log()
    note(log, 0, LayerOutcome.GATE)
    (layer,) = log.receipt().layers
    assert (layer.visible, layer.recoverable_not_selected) == (120, 0)


def test_bytes_are_charged_to_the_layer_at_hand() -> None:
    log = make_log()
    log.charge([("files", 100)])
    note(log, 0)
    note(log, 1)
    log.charge([("host", 4)])
    index = Index()
    index.generation = 9
    log.exact(2, LayerOutcome.DENSE, index, 60, StageTimes())
    log.exact(3, LayerOutcome.SHORT, None, 60, StageTimes())
    first, second, dense, short = log.receipt().layers
    assert [layer.read_bytes for layer in (first, second, dense)] == [(("files", 100),), (), ()]
    assert (dense.visible, dense.generation, dense.index_bytes) == (120, 9, 0)
    assert (short.visible, short.generation, short.outcome) == (120, 0, LayerOutcome.SHORT)
    log.begin()
    assert log.receipt().layers == ()


def test_a_step_that_is_begun_again_forgets_what_was_charged() -> None:
    log = make_log()
    log.charge([("files", 100)])
    log.begin()
    note(log, 0)
    assert log.receipt().layers[0].read_bytes == ()


def test_rows_are_counted_in_chunks() -> None:
    rows = torch.tensor([[0, 7, 8, NO_UNIT], [16, 17, NO_UNIT, NO_UNIT]])
    assert count_rows(rows, 8, [0]) == 2
    assert count_rows(rows, 8, {1, 2}) == 3
    assert count_rows(rows, 8, []) == 0
    assert count_rows(rows[:, :0], 8, [0]) == 0


def test_the_greatest_estimate_counts() -> None:
    none = Selection.none(Owner.LAYER, 1)
    assert greatest_estimate(none) is None
    units = torch.zeros(1, 1, dtype=torch.int64)
    assert greatest_estimate(Selection(Owner.LAYER, units, 1, estimate=torch.tensor([0.25, 0.5]))) == 0.5
