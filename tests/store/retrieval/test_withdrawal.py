"""Rows on their way out: unreachable, then unread, then gone."""

from __future__ import annotations

from retrieval_cases import make_scene

from kvstrata.contract.manifest import DeletionReceipt, LookupReceipt
from kvstrata.store.retrieval import ReclaimOutcome


def test_rows_go_after_the_look_ups_that_may_have_named_them() -> None:
    scene = make_scene()
    retrieval, gone = scene.retrieval, []

    def delete() -> DeletionReceipt:
        for layer in range(2):
            retrieval.directory.evict(scene.record, layer)
        gone.append(True)
        return DeletionReceipt("rows [3, 4)", "device", durable=True)

    withdrawal = retrieval.withdrawals.withdraw(23, 3, 4)
    assert withdrawal.lookups == {scene.lookup.number}
    later = scene.look_up()
    assert isinstance(later, LookupReceipt)
    assert (later.candidates, later.withdrawn, len(later.scores)) == ((0, 7), 1, 2)
    assert retrieval.withdrawals.reclaim(withdrawal, delete) is ReclaimOutcome.LOOKUP_IN_FLIGHT
    assert gone == []
    scene.finish_gather()
    assert scene.row(1)[0] == [110030, 110031, 110032, 110033]
    # The later look-up has seen the tombstone, so it holds nothing back.
    assert retrieval.withdrawals.reclaim(withdrawal, delete) is ReclaimOutcome.RECLAIMED
    assert gone == [True]


def test_a_deletion_that_a_crash_may_undo_is_none() -> None:
    scene = make_scene()
    scene.retrieval.finish(scene.lookup)
    withdrawals = scene.retrieval.withdrawals
    withdrawal = withdrawals.withdraw(23, 0, 8)
    receipt = DeletionReceipt("rows", "files", durable=False)
    assert withdrawals.reclaim(withdrawal, lambda: receipt) is ReclaimOutcome.DELETION_NOT_DURABLE


def test_positions_of_another_history_stay_visible() -> None:
    withdrawals = make_scene().retrieval.withdrawals
    withdrawals.withdraw(22, 0, 8)
    assert withdrawals.hides(22, 0)
    assert not withdrawals.hides(23, 0)
    assert not withdrawals.hides(22, 8)
