"""Two hops have credits each, and whichever fails, both destinations are settled."""

from __future__ import annotations

import pytest
from transfer_parts import SIZE, Bench, done, holds, make_unit, pattern

from kvstrata.cost.credits import Credits
from kvstrata.errors import Reason
from kvstrata.store.destinations import SlotDestination
from kvstrata.store.staged_transfer import StagedTransfer
from kvstrata.store.transfer_records import CopyEvent, CopyOrder, Refusal, TransferOutcome
from kvstrata.store.transfer_workers import TransferWorkers

UNIT = make_unit(1)


class Hops:
    """files -> host over `first`, host -> device over `second`, which copies out of the stage."""

    def __init__(self, credits: Credits | None = None) -> None:  # noqa: A002
        self.first, self.second = Bench(), Bench(credits=credits)
        self.first.queue.direction, self.second.queue.direction = "files -> host", "host -> device"
        self.stage, self.final = self.first.place(["stage"]), self.second.place(["final"])
        self.left = 0
        self.second.copier.fill = self.copy  # type: ignore[method-assign]

    def copy(self, order: CopyOrder) -> None:
        assert isinstance(order.into, SlotDestination)
        source = self.first.arena.backing.readable(self.stage.grants[0].slot)
        order.into.arena.backing.writable(order.into.grants[0].slot)[:] = source

    def leave(self) -> None:
        self.left += 1
        self.first.arena.release(self.stage.grants[0])

    def transfer(self) -> StagedTransfer:
        return StagedTransfer(
            self.first.queue,
            self.second.queue,
            UNIT,
            make_unit(1, source="host"),
            SIZE,
            self.stage,
            self.final,
            staged=self.leave,
        )

    def nothing_is_out(self, published: int = 0) -> bool:
        return self.first.balanced() and self.second.balanced(published=published)


@pytest.mark.parametrize("threads", [0, 1])
def test_both_hops(threads: int) -> None:
    hops = Hops()
    transfer = hops.transfer()
    workers = [TransferWorkers(bench.queue, threads) for bench in (hops.first, hops.second)] if threads else []
    for each in workers:
        each.start()
    assert transfer.start() is None
    result = transfer.finish()
    for each in workers:
        each.stop()
    assert not isinstance(result, Refusal)
    assert result.ready
    assert holds(hops.final, UNIT)
    assert [stage.direction for stage in result.receipt.stages] == ["files -> host", "host -> device"]
    assert [stage.moved_bytes for stage in result.receipt.stages] == [SIZE, SIZE]
    assert result.receipt.direction == "files -> host, host -> device"
    assert transfer.finish() is result
    transfer.cancel()
    assert hops.left == 1
    assert hops.nothing_is_out(published=1)


def test_the_second_hop_begins_when_the_first_has_landed() -> None:
    hops = Hops()
    hops.transfer().start()
    assert hops.second.queue.pending == 0
    assert hops.first.queue.run_one()
    assert hops.second.queue.pending == 1
    assert bytes(hops.first.arena.backing.readable(hops.stage.grants[0].slot)) == pattern(UNIT, 0)


def test_no_credits_for_the_first_hop() -> None:
    hops = Hops()
    hops.first.queue.close()
    refusal = hops.transfer().start()
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.CLOSED
    assert hops.first.arena.belongs(hops.stage.grants[0], "stage")
    assert hops.second.arena.belongs(hops.final.grants[0], "final")


def test_no_credits_for_the_second_hop() -> None:
    hops = Hops(credits=Credits(0, SIZE, SIZE, 1))
    transfer = hops.transfer()
    transfer.start()
    refusal = transfer.finish()
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.CREDIT_PRESSURE
    assert hops.left == 1
    assert hops.nothing_is_out()


def test_the_first_hop_fails() -> None:
    hops = Hops()
    hops.first.copier.answers.append({"checksum_ok": False})
    transfer = hops.transfer()
    transfer.start()
    result = transfer.finish()
    assert not isinstance(result, Refusal)
    assert result.outcome is TransferOutcome.CHECKSUM_MISMATCH
    assert hops.left == 0
    assert hops.nothing_is_out()


@pytest.mark.parametrize("moment", ["queued", "first", "second"])
def test_cancelled_at_any_hop(moment: str) -> None:
    hops = Hops()
    transfer = hops.transfer()
    transfer.start()
    order = None
    if moment == "first":
        order = hops.first.start()
    elif moment == "second":
        hops.first.queue.run_one()
        order = hops.second.start()
    transfer.cancel()
    transfer.cancel()
    if order is not None:
        event: CopyEvent = done(order)
        (hops.first if moment == "first" else hops.second).queue.complete(event)
    assert hops.left == (moment == "second")
    assert hops.nothing_is_out()
