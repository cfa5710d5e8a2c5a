"""One transfer from admission to release: what is right is published, everything else is told apart and given back."""

from __future__ import annotations

import dataclasses

import pytest
from chunks_and_faults import LAYOUT
from transfer_parts import SIZE, Bench, done, holds, make_unit, store_error

from kvstrata.contract.identity import Namespace
from kvstrata.contract.states import SlotState, TransferState, WaiterState
from kvstrata.cost.credits import Credit, Credits, PathRate
from kvstrata.errors import ConfigurationError, Reason, StateError
from kvstrata.lab.soak.interrupts import interrupt
from kvstrata.store.transfer_records import Acknowledgement, Refusal, SegmentSource, TransferOutcome
from kvstrata.tiers.memory import Grant


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_from_admission_to_publication(bench: Bench) -> None:
    place = bench.place(["a", "b", "c"])
    waiter = bench.submit(1, place, deadline=200.0)
    transfer = waiter.transfer
    assert transfer.state is TransferState.RESERVED
    assert bench.pool.reserved == Credits(3 * SIZE, 3 * SIZE, 3 * SIZE, 1)
    bench.clock.now += 2
    order = bench.start()
    assert (transfer.state, waiter.poll()) == (TransferState.COPYING, None)
    bench.copier.fill(order)
    bench.clock.now += 3
    assert bench.queue.complete(done(order)) is Acknowledgement.ACCEPTED
    assert transfer.state is TransferState.VALIDATED
    assert [bench.arena.state(grant.slot) for grant in place.grants] == [SlotState.RESERVED] * 3
    assert bench.pool.reserved == Credits(0, 3 * SIZE, 0, 1)
    result = waiter.finish()
    assert (result.outcome, result.ready, result.error) == (TransferOutcome.READY, True, None)
    assert (transfer.state, waiter.state) == (TransferState.RELEASED, WaiterState.READY)
    assert [bench.arena.state(grant.slot) for grant in place.grants] == [SlotState.PUBLISHED] * 3
    assert holds(place, make_unit(1, 3))
    receipt = result.receipt
    assert (receipt.requested_bytes, receipt.moved_bytes, receipt.coalesced_bytes) == (3 * SIZE, 3 * SIZE, 0)
    assert (receipt.queue_s, receipt.service_s, receipt.direction) == (2, 3, "files -> device")
    assert waiter.settled
    assert waiter.finish() is result
    assert bench.balanced(published=3)
    totals = bench.queue.totals
    assert (totals.requests, totals.transfers, totals.ready, totals.moved_bytes) == (1, 1, 1, 3 * SIZE)
    assert (totals.queue_s, totals.service_s) == (2, 3)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"bytes_completed": SIZE - 1}, TransferOutcome.SHORT_COPY),
        ({"bytes_completed": SIZE + 1}, TransferOutcome.SHORT_COPY),
        ({"checksum_ok": False}, TransferOutcome.CHECKSUM_MISMATCH),
        ({"codec": "zstd"}, TransferOutcome.LAYOUT_MISMATCH),
        ({"layout": dataclasses.replace(LAYOUT, page_tokens=128)}, TransferOutcome.LAYOUT_MISMATCH),
        ({"error": store_error(Reason.CHUNK_DAMAGED)}, TransferOutcome.CHECKSUM_MISMATCH),
        ({"error": store_error(Reason.CHUNK_TRUNCATED)}, TransferOutcome.SHORT_COPY),
        ({"error": store_error(Reason.CHUNK_MISSING)}, TransferOutcome.FAILED),
    ],
)
def test_what_is_not_right_is_never_published(bench: Bench, changes: dict, outcome: TransferOutcome) -> None:
    bench.copier.answers.append(changes)
    waiter = bench.submit()
    result = waiter.finish()
    assert (result.outcome, waiter.state) == (outcome, WaiterState.FAILED)
    assert result.error is changes.get("error")
    assert bench.balanced()


def test_an_error_that_the_copier_raises(bench: Bench) -> None:
    error = store_error(Reason.STORE_IO)
    bench.copier.answers.append(error)
    result = bench.submit().finish()
    assert (result.outcome, result.error) == (TransferOutcome.FAILED, error)
    assert bench.balanced()


def test_a_copier_that_breaks_is_seen_by_who_waits(bench: Bench) -> None:
    bench.copier.answers.append(ZeroDivisionError("bug"))
    first, second = bench.submit(), bench.submit()
    with pytest.raises(ZeroDivisionError):
        first.finish()
    for waiter in (first, second):
        with pytest.raises(ZeroDivisionError):
            waiter.poll()
        assert waiter.state is WaiterState.FAILED
    assert bench.balanced()


@pytest.mark.parametrize("moment", ["queued", "copying", "copied"])
def test_a_cache_that_moved_on(bench: Bench, moment: str) -> None:
    generation = [1]
    waiter = bench.submit(0, bench.place(fresh=lambda: generation[0] == 1))
    if moment == "queued":
        generation[0] = 2
        assert bench.queue.start() is None
    else:
        order = bench.start()
        if moment == "copying":
            generation[0] = 2
        bench.queue.complete(done(order))
        generation[0] = 2
    assert waiter.finish().outcome is TransferOutcome.STALE_CACHE_GENERATION
    assert bench.balanced()


@pytest.mark.parametrize("moment", ["queued", "copied"])
def test_a_slot_that_went_to_somebody_else(bench: Bench, moment: str) -> None:
    """The ABA problem: the number is the same, the owner may even be, the reservation is another."""
    place = bench.place()
    waiter = bench.submit(0, place)
    order = None if moment == "queued" else bench.start()
    bench.arena.release(place.grants[0])
    stolen = bench.arena.reserve("owner")
    assert stolen is not None
    assert stolen.slot == place.grants[0].slot
    if order is not None:
        bench.queue.complete(done(order))
    else:
        assert bench.queue.start() is None
    assert waiter.finish().outcome is TransferOutcome.RECYCLED_DESTINATION
    assert bench.arena.state(stolen.slot) is SlotState.RESERVED
    assert bench.arena.belongs(stolen, "owner")
    assert bench.balanced(published=1)


def test_a_slot_that_was_renamed(bench: Bench) -> None:
    place = bench.place()
    waiter = bench.submit(0, place)
    order = bench.start()
    bench.arena.rename(place.grants[0], "owner", "another")
    bench.queue.complete(done(order))
    assert waiter.finish().outcome is TransferOutcome.IDENTITY_MISMATCH
    assert bench.arena.belongs(place.grants[0], "another")
    assert bench.balanced(published=1)


def test_a_publication_that_is_refused(bench: Bench) -> None:
    def refuse(index: int) -> None:
        raise StateError(Reason.NOT_COMMITTED, f"slot {index} has a replica already")

    waiter = bench.submit(0, bench.place(publish_slot=refuse))
    result = waiter.finish()
    assert result.outcome is TransferOutcome.FAILED
    assert result.error is not None
    assert "slot 0 has a replica already" in result.error.cause
    assert bench.balanced()


class TestAcknowledgements:
    def test_twice(self, bench: Bench) -> None:
        waiter = bench.submit()
        order = bench.start()
        bench.queue.complete(done(order))
        assert bench.queue.complete(done(order)) is Acknowledgement.DUPLICATE
        assert waiter.finish().ready
        assert bench.queue.complete(done(order, checksum_ok=False)) is Acknowledgement.DUPLICATE
        assert bench.queue.totals.duplicates == 2
        assert bench.balanced(published=1)

    def test_in_another_order(self, bench: Bench) -> None:
        waiters = [bench.submit(number) for number in range(3)]
        places = [waiter.destination for waiter in waiters]
        orders = [bench.start() for _ in range(3)]
        for index in (2, 0, 1):
            bench.copier.fill(orders[index])
            assert bench.queue.complete(done(orders[index])) is Acknowledgement.ACCEPTED
        assert [waiter.finish().ready for waiter in waiters] == [True] * 3
        assert all(holds(place, make_unit(number)) for number, place in enumerate(places))
        assert bench.balanced(published=3)

    def test_of_nothing(self, bench: Bench) -> None:
        bench.submit(0)
        order = bench.start()
        bench.submit(1)
        for generation in (0, 2, 3, -1):
            assert bench.queue.complete(done(order, bytes_completed=0).__class__(generation, SIZE, LAYOUT)) is (
                Acknowledgement.UNKNOWN
            )
        assert bench.queue.complete(done(order)) is Acknowledgement.ACCEPTED

    def test_after_a_reset(self, bench: Bench) -> None:
        waiter = bench.submit(0)
        queued = bench.submit(1)
        order = bench.start()
        bench.queue.reset()
        assert (waiter.finish().outcome, queued.finish().outcome) == (TransferOutcome.CANCELLED,) * 2
        assert bench.arena.used_slots == 1  # the copier may still write to it
        fresh = bench.submit(0)
        assert fresh.transfer.generation > order.generation
        assert bench.queue.complete(done(order)) is Acknowledgement.STALE
        assert fresh.poll() is None
        assert bench.queue.totals.stale == 1
        assert fresh.finish().ready
        assert bench.balanced(published=1)


class TestCancelling:
    @pytest.mark.parametrize("moment", ["queued", "copying", "copied", "ready"])
    def test_at_every_point(self, bench: Bench, moment: str) -> None:
        waiter = bench.submit()
        order = bench.start() if moment != "queued" else None
        if moment in ("copied", "ready"):
            assert order is not None
            bench.queue.complete(done(order))
        if moment == "ready":
            waiter.finish()
        waiter.cancel()
        waiter.cancel()
        if moment == "ready":
            assert waiter.finish().ready
            assert bench.balanced(published=1)
            return
        assert waiter.finish().outcome is TransferOutcome.CANCELLED
        if moment == "copying":
            assert order is not None
            assert not waiter.settled
            assert bench.pool.reserved == Credits(SIZE, SIZE, SIZE, 1)
            others = [bench.arena.reserve("other") for _ in range(7)]
            assert bench.arena.reserve("other") is None  # nobody gets the slot before the copier has acknowledged
            assert bench.queue.complete(done(order)) is Acknowledgement.STALE
            for grant in others:
                assert isinstance(grant, Grant)
                bench.arena.release(grant)
        assert waiter.settled
        assert bench.queue.start() is None
        assert bench.balanced()

    def test_a_dead_read_is_not_joined(self, bench: Bench) -> None:
        waiter = bench.submit(4)
        order = bench.start()
        waiter.cancel()
        again = bench.submit(4)
        assert again.transfer is not waiter.transfer
        bench.queue.complete(done(order))
        assert again.finish().ready
        assert bench.balanced(published=1)


class TestDeadlines:
    def test_a_hung_read_makes_its_waiters_late(self, bench: Bench) -> None:
        waiter, patient = bench.submit(0, deadline=105.0), bench.submit(0, deadline=500.0)
        order = bench.start()
        bench.clock.now = 104.9
        assert (bench.queue.expire(), waiter.poll()) == (0, None)
        bench.clock.now = 105.0
        assert bench.queue.expire() == 1
        assert waiter.finish().outcome is TransferOutcome.LATE
        assert (waiter.settled, bench.arena.used_slots) == (False, 2)
        bench.copier.fill(order)
        bench.queue.complete(done(order))
        assert waiter.settled
        assert patient.finish().ready
        assert holds(patient.destination, make_unit())
        assert bench.balanced(published=1)

    def test_late_bytes_are_not_published(self, bench: Bench) -> None:
        waiter = bench.submit(0, deadline=105.0)
        order = bench.start()
        bench.clock.now = 106.0
        assert bench.queue.complete(done(order)) is Acknowledgement.STALE
        assert waiter.finish().outcome is TransferOutcome.LATE
        assert bench.balanced()

    def test_in_time_but_collected_later(self, bench: Bench) -> None:
        waiter = bench.submit(0, deadline=105.0)
        bench.queue.complete(done(bench.start()))
        bench.clock.now = 1000.0
        assert waiter.finish().ready

    def test_late_in_the_queue(self, bench: Bench) -> None:
        waiter = bench.submit(0, deadline=105.0)
        bench.clock.now = 106.0
        assert bench.queue.start() is None
        assert waiter.finish().outcome is TransferOutcome.LATE
        assert bench.balanced()

    def test_what_cannot_arrive_in_time_is_refused(self) -> None:
        bench = Bench(rate=lambda: PathRate(setup_s=1.0, bytes_per_s=SIZE, numa_s=3.0))
        place = bench.place()
        refusal = bench.submit(0, place, deadline=101.9)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.DEADLINE
        assert f"{SIZE} bytes files -> device need about 2.000000 s, and 1.900000 s are left" in refusal.detail
        assert bench.submit(0, place, deadline=102.1).state is WaiterState.WAITING
        behind = bench.submit(1, deadline=102.5)
        assert isinstance(behind, Refusal)  # one unit stands in the queue before it
        far = bench.submit(1, deadline=104.0, cross_numa=True)
        assert isinstance(far, Refusal)
        assert bench.submit(1, deadline=103.5).state is WaiterState.WAITING
        assert bench.queue.totals.refused == 3

    def test_a_deadline_that_is_over(self, bench: Bench) -> None:
        refusal = bench.submit(0, deadline=100.0)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.DEADLINE


class TestCoalescing:
    def test_one_read_for_many(self, bench: Bench) -> None:
        waiters = [bench.submit(3, bench.place([i, i])) for i in range(2)]
        order = bench.start()
        waiters.append(bench.submit(3, bench.place([2, 2])))
        assert bench.pool.reserved == Credits(2 * SIZE, 6 * SIZE, 2 * SIZE, 3)
        bench.copier.fill(order)
        bench.queue.complete(done(order))
        results = [waiter.finish() for waiter in waiters]
        assert [result.ready for result in results] == [True] * 3
        assert [result.receipt.moved_bytes for result in results] == [2 * SIZE, 0, 0]
        assert [result.receipt.coalesced_bytes for result in results] == [0, 2 * SIZE, 2 * SIZE]
        assert all(holds(waiter.destination, make_unit(3, 2)) for waiter in waiters)
        totals = bench.queue.totals
        assert (totals.requests, totals.transfers) == (3, 1)
        assert (totals.requested_bytes, totals.moved_bytes, totals.coalesced_bytes) == (6 * SIZE, 2 * SIZE, 4 * SIZE)
        assert bench.balanced(published=6)

    @pytest.mark.parametrize(
        "changes",
        [
            {"namespace": Namespace("another")},
            {"namespace": Namespace("default", "salt")},
            {"context": b"another"},
            {"segments": (SegmentSource(b"\x01" * 32, 0),)},
            {"segments": (SegmentSource(bytes(32), 1),)},
            {"segments": (SegmentSource(bytes(32), 0, replica_generation=1),)},
            {"segments": (SegmentSource(bytes(32), 0, epoch=1),)},
            {"layout": dataclasses.replace(LAYOUT, page_tokens=128)},
            {"codec": "zstd"},
            {"source": "link"},
        ],
    )
    def test_every_field_decides(self, bench: Bench, changes: dict) -> None:
        bench.submit(0)
        bench.submit(0, unit=make_unit(0, **changes))
        bench.submit(0)
        assert bench.queue.totals.transfers == 2

    @pytest.mark.parametrize("moment", ["queued", "copying"])
    @pytest.mark.parametrize("leaving", [0, 1])
    def test_who_leaves_takes_nobody_along(self, bench: Bench, moment: str, leaving: int) -> None:
        waiters = [bench.submit(5), bench.submit(5)]
        order = bench.start() if moment == "copying" else None
        waiters[leaving].cancel()
        order = order or bench.start()
        bench.copier.fill(order)
        assert bench.queue.complete(done(order)) is Acknowledgement.ACCEPTED
        stays = waiters[1 - leaving]
        assert stays.finish().ready
        assert holds(stays.destination, make_unit(5))
        assert bench.balanced(published=1)

    def test_the_last_one_to_leave_lets_it_die(self, bench: Bench) -> None:
        waiters = [bench.submit(5), bench.submit(5)]
        order = bench.start()
        for waiter in waiters:
            waiter.cancel()
        assert waiters[0].transfer.state is TransferState.CANCELLED
        assert bench.queue.complete(done(order)) is Acknowledgement.STALE
        assert bench.balanced()

    def test_what_has_landed_is_not_joined(self, bench: Bench) -> None:
        first = bench.submit(5)
        bench.queue.complete(done(bench.start()))
        second = bench.submit(5)
        assert second.transfer is not first.transfer
        assert [first.finish().ready, second.finish().ready] == [True, True]

    def test_a_stale_place_does_not_hold_up_the_others(self, bench: Bench) -> None:
        stale, good, late = bench.place(), bench.place(), bench.place()
        waiters = [bench.submit(5, place) for place in (stale, good, late)]
        bench.arena.release(stale.grants[0])
        order = bench.start()
        assert order.into is good
        bench.arena.release(late.grants[0])
        bench.queue.complete(done(order))
        outcomes = [waiter.finish().outcome for waiter in waiters]
        recycled = TransferOutcome.RECYCLED_DESTINATION
        assert outcomes == [recycled, TransferOutcome.READY, recycled]
        assert bench.copier.copies == 0
        assert bench.balanced(published=1)

    def test_one_unit_has_one_size(self, bench: Bench) -> None:
        bench.submit(5)
        with pytest.raises(ConfigurationError, match="under way"):
            bench.queue.submit(make_unit(5), 7, bench.place())


class TestCredits:
    @pytest.mark.parametrize(
        ("credits", "short", "reason"),
        [
            (Credits(SIZE, 9 * SIZE, 9 * SIZE, 9), Credit.PINNED, Reason.CREDIT_PRESSURE),
            (Credits(9 * SIZE, SIZE, 9 * SIZE, 9), Credit.STAGING, Reason.CREDIT_PRESSURE),
            (Credits(9 * SIZE, 9 * SIZE, SIZE, 9), Credit.LINK, Reason.CREDIT_PRESSURE),
            (Credits(9 * SIZE, 9 * SIZE, 9 * SIZE, 1), Credit.QUEUE, Reason.QUEUE_FULL),
        ],
    )
    def test_each_is_a_refusal_of_its_own(self, credits: Credits, short: Credit, reason: Reason) -> None:  # noqa: A002
        bench = Bench(credits=credits)
        first, place = bench.submit(0), bench.place()
        refusal = bench.submit(1, place)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.credit) == (reason, short)
        assert f"lack {short}" in refusal.detail
        assert bench.arena.belongs(place.grants[0], "owner")
        assert first.finish().ready
        assert bench.submit(1, place).finish().ready
        assert bench.balanced(published=2)

    def test_a_shared_unit_needs_no_backend_credits(self) -> None:
        bench = Bench(credits=Credits(SIZE, 2 * SIZE, SIZE, 2))
        assert [bench.submit(0).state for _ in range(2)] == [WaiterState.WAITING] * 2

    def test_what_never_fits_is_not_waited_for(self) -> None:
        bench = Bench(credits=Credits(SIZE - 1, SIZE, SIZE, 1))
        refusal = bench.submit(0, wait_s=1e9)
        assert isinstance(refusal, Refusal)
        assert refusal.credit is Credit.PINNED

    def test_a_closed_queue(self, bench: Bench) -> None:
        queued = bench.submit(0)
        bench.queue.close()
        assert queued.finish().outcome is TransferOutcome.CANCELLED
        refusal = bench.submit(1)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.CLOSED


def test_a_waiter_whom_nobody_serves(bench: Bench) -> None:
    waiter = bench.submit()
    bench.start()
    with pytest.raises(StateError, match="nobody copies"):
        waiter.finish()


@pytest.mark.parametrize("line", range(1, 100, 3))
@pytest.mark.parametrize("action", ["complete", "poll", "cancel"])
def test_an_interrupt_leaves_no_waiter_without_an_end(bench: Bench, action: str, line: int) -> None:
    first, second = bench.place(["a"]), bench.place(["b"])
    waiters = [bench.submit(1, place, unit=make_unit(1)) for place in (first, second)]
    order = bench.start()
    bench.copier.fill(order)
    if action != "complete":
        bench.queue.complete(done(order))
    calls = {
        "complete": lambda: bench.queue.complete(done(order)),
        "poll": waiters[0].poll,
        "cancel": waiters[0].cancel,
    }
    interrupt(calls[action], line)
    bench.queue.reclaim(set(waiters))
    bench.queue.complete(done(order))
    ends = [waiter.poll() for waiter in waiters]
    assert None not in ends
    ready = [place for place, end in zip((first, second), ends, strict=True) if end is not None and end.ready]
    assert all(holds(place, make_unit(1)) for place in ready)
    bench.arena.reclaim({grant for place in ready for grant in place.grants})
    assert bench.balanced(published=len(ready))
