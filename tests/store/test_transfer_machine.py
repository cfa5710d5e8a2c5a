"""Any order of admissions, joins, cancellations, deadlines, completions, thefts and resets, against a simple reference.

After every step: credits out are exactly those of requests not settled, no slot has two owners, and whoever has ended
keeps his end. At the end everything is acknowledged: nobody waits, and nothing is out but what was published.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transfer_parts import SIZE, Bench, done, holds

from kvstrata.contract.states import SlotState
from kvstrata.cost.credits import Credits
from kvstrata.errors import Reason
from kvstrata.store.transfer_records import Acknowledgement, Refusal, TransferOutcome

ENOUGH = Credits(4 * SIZE, 6 * SIZE, 4 * SIZE, 5)


class Transfers(RuleBasedStateMachine):
    """`ended` is the reference's memory of results; `flying` the copies that were started and not acknowledged."""

    @initialize()
    def begin(self) -> None:
        self.bench = Bench(slots=12, credits=ENOUGH)
        self.waiters: list[Any] = []
        self.ended: dict[Any, TransferOutcome] = {}
        self.flying: list[Any] = []
        self.landed: list[Any] = []
        self.stolen: list[Any] = []
        self.bad: set[int] = set()

    @rule(number=st.integers(0, 2), patience=st.sampled_from([1.0, 5.0, math.inf]))
    def submit(self, number: int, patience: float) -> None:
        if not self.bench.arena.free_slots:
            return
        place = self.bench.place([("owner", len(self.waiters))])
        before = self.bench.pool.reserved
        answer = self.bench.submit(number, place, deadline=self.bench.clock.now + patience)
        if isinstance(answer, Refusal):
            assert answer.reason in (Reason.CREDIT_PRESSURE, Reason.QUEUE_FULL)
            # What has expired meanwhile may have been given back, and nothing was taken.
            assert self.bench.pool.reserved.staging <= before.staging
            place.release()
        else:
            self.waiters.append(answer)

    @rule()
    def start(self) -> None:
        order = self.bench.queue.start()
        if order is not None:
            assert all(order.generation != other.generation for other in self.flying + self.landed)
            self.flying.append(order)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), kind=st.sampled_from(["whole", "whole", "short", "checksum"]))
    def acknowledge(self, data: st.DataObject, kind: str) -> None:
        order = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if kind != "whole":
            self.bad.add(order.generation)
        if self.bench.arena.state(order.into.grants[0].slot) is SlotState.RESERVED and order.into.check() == "ready":
            self.bench.copier.fill(order)
        changes = {"whole": {}, "short": {"bytes_completed": 1}, "checksum": {"checksum_ok": False}}[kind]
        answer = self.bench.queue.complete(done(order, **changes))
        assert answer in (Acknowledgement.ACCEPTED, Acknowledgement.STALE)
        self.landed.append(order)

    @precondition(lambda self: self.landed)
    @rule(data=st.data())
    def acknowledge_again(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.landed))
        before = self.bench.pool.reserved
        assert self.bench.queue.complete(done(order)) is Acknowledgement.DUPLICATE
        assert self.bench.pool.reserved == before

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiters))
        result = waiter.poll()
        if result is not None and result.ready and waiter not in self.ended:
            assert holds(waiter.destination, waiter.transfer.unit)
            assert waiter.transfer.generation not in self.bad
            assert waiter not in self.stolen

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.waiters)).cancel()

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def steal(self, data: st.DataObject) -> None:
        """Somebody frees a slot that is still on its way to be filled: a bug elsewhere, to be told apart here."""
        waiter = data.draw(st.sampled_from(self.waiters))
        grant = waiter.destination.grants[0]
        if waiter.result is None and waiter not in self.stolen:
            self.bench.arena.release(grant)
            self.stolen.append(waiter)

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.bench.clock.now += seconds
        self.bench.queue.expire()

    @rule()
    def reset(self) -> None:
        self.bench.queue.reset()

    @rule()
    def reclaim(self) -> None:
        out = self.bench.queue.reclaim(set(self.waiters))
        assert all(place in [waiter.destination for waiter in self.waiters] for place in out)

    @invariant()
    def nothing_is_lost_or_given_twice(self) -> None:
        pool, book = self.bench.pool, self.bench.queue.book
        held = sum(reservation.amount.staging for reservation in pool.outstanding)
        assert held == pool.reserved.staging == SIZE * len(book.waiters)
        assert pool.reserved.queue == len(book.waiters) <= ENOUGH.queue
        reading = [each for each in book.transfers.values() if each.credits is not None]
        assert pool.reserved.pinned == pool.reserved.link == SIZE * len(reading)
        assert set(book.copying) == {order.generation for order in self.flying}

    @invariant()
    def an_end_is_an_end(self) -> None:
        for waiter in self.waiters:
            if waiter in self.ended:
                assert waiter.result.outcome is self.ended[waiter]
            elif waiter.result is not None:
                self.ended[waiter] = waiter.result.outcome
        for waiter in self.waiters:
            flying = any(order.generation == waiter.transfer.generation for order in self.flying)
            assert waiter.settled or waiter.result is None or flying
            assert not waiter.settled or waiter.result is not None

    @invariant()
    def a_slot_under_a_copier_is_nobody_elses(self) -> None:
        for order in self.flying:
            waiter = next(each for each in self.waiters if each.destination is order.into)
            assert waiter in self.stolen or order.into.check() is TransferOutcome.READY

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        while (order := bench.queue.start()) is not None:
            self.flying.append(order)
        for order in self.flying:
            bench.queue.complete(done(order))
        results = [waiter.poll() for waiter in self.waiters]
        assert all(result is not None for result in results)
        ready = sum(result.ready for result in results if result is not None)
        assert bench.balanced(published=ready)


def test_bytes_that_came_through_a_slot_that_changed_hands_are_nobodys() -> None:
    """The first of two equal requests loses its slot while it is being filled: the second takes nothing from there."""
    bench = Bench(slots=12, credits=ENOUGH)
    first = bench.place([("owner", 0)])
    waiter = bench.submit(2, first, deadline=math.inf)
    order = bench.queue.start()
    bench.arena.release(first.grants[0])
    stranger = bench.arena.reserve("stranger")
    assert stranger is not None
    second = bench.place([("owner", 1)])
    joined = bench.submit(2, second, deadline=math.inf)
    bench.queue.complete(done(order))
    assert waiter.poll().outcome is TransferOutcome.RECYCLED_DESTINATION
    assert joined.poll().outcome is TransferOutcome.RECYCLED_DESTINATION


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
