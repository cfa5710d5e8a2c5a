"""The account adds up what the parts report, and refuses a prompt before anything is computed."""

from __future__ import annotations

import pytest
from chunks_and_faults import LAYERS, LAYOUT
from directory_parts import SIZE, extend, make_directory, make_history, make_ids
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.receipts import Recompute, RestoreReceipt, SaveReceipt, StepReceipt
from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.residency import plan_residency
from kvstrata.errors import BudgetError, Reason
from kvstrata.runtime.ledger import LedgerBook
from kvstrata.store.publication import PublicationTotals

STRIDE = LAYOUT.segment_bytes + 512
WORKSPACE = 1000


def make_book(slots: int = 30) -> LedgerBook:
    return LedgerBook(make_directory(slots), LAYOUT, 10**9, STRIDE, WORKSPACE)


def test_what_steps_report_is_added_up() -> None:
    book = make_book()
    book.step(StepReceipt(0, 3, 3, 10, 100, 1, 0.5, 0.25, 0))
    book.step(StepReceipt(3, 1, 4, 20, 200, 2, 0.5, 0.25, 0))
    book.recomputed(2, 2)
    book.restored(RestoreReceipt("talk", 1, 5, 5, 5, 0, 0, 1.0))
    book.saved(SaveReceipt("talk", 1, 5, 1, 1, 0, 2.0))
    found = book.ledger([], 3, PublicationTotals(written_bytes=7, present_bytes=5, service_s=1.0), ())
    assert found.tokens_computed == 4
    assert found.tokens_recomputed == 2
    assert found.tokens_restored == 3
    assert (found.traffic["file"].requested_bytes, found.traffic["file"].moved_bytes) == (300, 300)
    assert (found.traffic["device"].requested_bytes, found.traffic["device"].resident_hit_bytes) == (330, 30)
    assert found.traffic["file_writes"].requested_bytes == 12
    assert found.traffic["file_writes"].moved_bytes == 7
    assert (found.exposed_stall_s, found.load_s, found.save_s) == (1.0, 1.5, 3.0)
    assert found.staging_bytes == 3 * STRIDE


def test_bytes_by_place() -> None:
    directory = make_directory(30)
    book = LedgerBook(directory, LAYOUT, 10**9, STRIDE, WORKSPACE)
    history = make_history(directory, 3)
    extend(history, make_ids(10))
    for record in history.chunks[:2]:
        directory.mark(record, FileReplicaState.WRITING)
        directory.mark(record, FileReplicaState.PUBLISHED)
    directory.evict(history.chunks[0], 0)
    recompute = Recompute(0, 1, Reason.CHUNK_DAMAGED, "")
    found = book.ledger([history], 0, None, (recompute,))
    slots, row = 4 * LAYERS - 1, LAYERS * LAYOUT.row_bytes
    assert found.logical_bytes == (3 * SIZE + 10) * row
    assert found.device_bytes == slots * STRIDE + WORKSPACE
    assert found.peak_device_bytes == 4 * LAYERS * STRIDE + WORKSPACE
    assert found.peak_over_logical == found.peak_device_bytes / found.logical_bytes
    assert found.file_bytes == 2 * LAYERS * LAYOUT.segment_bytes
    assert found.duplicate_bytes == (2 * LAYERS - 1) * LAYOUT.segment_bytes
    assert found.recomputes == (recompute,)
    held = slots * LAYOUT.segment_bytes
    rows = found.logical_bytes - LAYOUT.segment_bytes
    padding = slots * (STRIDE - LAYOUT.segment_bytes)
    assert found.fragmented_bytes == held - rows + padding


def test_an_empty_account_divides_by_nothing() -> None:
    assert make_book().ledger([], 0, None, ()).peak_over_logical == 0.0


@given(st.integers(1, 30 * SIZE), st.integers(1, 6 * SIZE), st.integers(0, 120))
def test_a_prompt_that_is_let_in_fits_every_step(tokens: int, rows: int, slots: int) -> None:
    """Whatever the check lets through has a plan for each slice and for the first token after it."""
    book = make_book(slots)
    try:
        book.require_fits(tokens, rows, lambda count: 1000 * count)
    except BudgetError as refusal:
        enough = refusal.required_bytes // 1000
        assert enough > slots
        make_book(enough).require_fits(tokens, rows, lambda count: 1000 * count)
        return
    start = 0
    while start < tokens:
        stop = min(tokens, (start // rows + 1) * rows) if start < tokens - 1 else tokens
        stop = min(stop, tokens - 1) if start < tokens - 1 else stop
        chunks = start // SIZE
        tail = -(-stop // SIZE) - chunks
        assert plan_residency(slots, [LAYERS] * chunks, tail * LAYERS) is not None, (start, stop)
        start = stop


def test_the_refusal_tells_what_would_do() -> None:
    with pytest.raises(BudgetError, match="smaller prefill_chunk") as refusal:
        make_book(3).require_fits(4 * SIZE, SIZE, lambda count: count)
    make_book(refusal.value.required_bytes).require_fits(4 * SIZE, SIZE, lambda count: count)
    assert refusal.value.reason is Reason.BUDGET_TOO_SMALL
    with pytest.raises(BudgetError):
        make_book(refusal.value.required_bytes - 1).require_fits(4 * SIZE, SIZE, lambda count: count)
