"""Receipts of selections: what is exact, and how layers add up."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from kvstrata.contract.method import AnswerClass, Mode, Owner, QueryVariant
from kvstrata.contract.receipts import StepReceipt
from kvstrata.contract.selection_receipts import LayerOutcome, LayerSelection, SelectionReceipt, StageTimes
from kvstrata.errors import Reason, StateError

CHOSEN = LayerSelection(
    0,
    LayerOutcome.SELECTED,
    Owner.KV_HEAD,
    2,
    visible=40,
    chosen_bytes=1000,
    read_bytes=(("files", 3000), ("host", 500)),
    index_bytes=64,
    times=StageTimes(append=1.0, build=2.0, speculate=3.0, select=4.0, fetch=5.0, gather=6.0, attend=7.0),
)
EXACT = LayerSelection(
    1, LayerOutcome.DENSE, Owner.KV_HEAD, 2, visible=80, read_bytes=(("files", 900),), index_bytes=8,
    times=StageTimes(build=0.5),
)  # fmt: skip


def receipt(*layers: LayerSelection) -> SelectionReceipt:
    return SelectionReceipt("00", "fixed", 1, "Rows(64)", Mode.APPROXIMATE, AnswerClass.APPROXIMATE, layers)


def step(contract: AnswerClass, *selections: SelectionReceipt) -> StepReceipt:
    return StepReceipt(
        start=8, rows=1, visible=9, resident_bytes=0, moved_bytes=0, moved_segments=0, stall_s=0.0, read_s=0.0,
        sealed=0, contract=contract, selections=selections,
    )  # fmt: skip


def test_three_outcomes_leave_rows_out() -> None:
    chose = {outcome for outcome in LayerOutcome if not outcome.exact}
    assert chose == {LayerOutcome.SELECTED, LayerOutcome.WIDENED, LayerOutcome.DEGRADED}


@pytest.mark.parametrize("outcome", list(LayerOutcome))
def test_a_receipt_chose_if_one_layer_did(outcome: LayerOutcome) -> None:
    found = receipt(EXACT, replace(CHOSEN, outcome=outcome, variant=QueryVariant.PREDICTED))
    assert found.chose is not outcome.exact
    assert found.variants == (frozenset() if outcome.exact else {QueryVariant.PREDICTED})


def test_layers_add_up() -> None:
    found = receipt(CHOSEN, EXACT)
    assert found.read_bytes == {"files": 3900, "host": 500}
    assert found.index_bytes == 72
    assert found.times == StageTimes(1.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0)


def test_read_amplification_counts_layers_that_chose() -> None:
    assert receipt(CHOSEN, EXACT).read_amplification == 3.5
    assert receipt(EXACT).read_amplification == 0.0
    assert receipt(replace(CHOSEN, chosen_bytes=0)).read_amplification == 0.0
    assert receipt(replace(CHOSEN, read_bytes=())).read_amplification == 0.0


def test_stages_add_up_one_by_one() -> None:
    assert StageTimes() + CHOSEN.times == CHOSEN.times
    doubled = CHOSEN.times + CHOSEN.times
    assert doubled == StageTimes(2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0)


def test_records_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        CHOSEN.visible = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        receipt(CHOSEN).layers = ()  # type: ignore[misc]


def test_an_exact_step_takes_no_selection_that_left_rows_out() -> None:
    assert step(AnswerClass.EXACT, receipt(EXACT)).contract is AnswerClass.EXACT
    assert step(AnswerClass.APPROXIMATE, receipt(CHOSEN)).selections[0].chose
    with pytest.raises(StateError) as caught:
        step(AnswerClass.EXACT, receipt(EXACT), receipt(CHOSEN))
    assert caught.value.reason is Reason.APPROXIMATION_NOT_ALLOWED
