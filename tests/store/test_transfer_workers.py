"""The same queue under threads: reads overlap, waits end, and an interrupt anywhere leaves nothing behind."""

from __future__ import annotations

import sys
import threading
import time
from linecache import getline
from types import FrameType
from typing import Any

import pytest
from transfer_parts import SIZE, Bench, PatternCopier, holds, make_unit

from kvstrata.cost.credits import Credit, Credits
from kvstrata.errors import ConfigurationError
from kvstrata.store import (
    credit_pool,
    destinations,
    transfer_admission,
    transfer_book,
    transfer_landing,
    transfer_state,
    transfers,
)
from kvstrata.store.transfer_records import CopyEvent, CopyOrder, Refusal, TransferOutcome
from kvstrata.store.transfer_workers import TransferWorkers
from kvstrata.tiers import memory


class GatedCopier(PatternCopier):
    """Says when it has begun to read, and reads on when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def read(self, order: CopyOrder) -> CopyEvent:
        self.begun.release()
        self.gate.acquire()
        return super().read(order)


def test_requests_of_many_threads() -> None:
    bench = Bench(slots=16, credits=Credits(4 * SIZE, 8 * SIZE, 4 * SIZE, 8), clock=time.perf_counter)
    wrong: list[Any] = []
    ready = [0] * 6

    def ask(thread: int) -> None:
        for turn in range(60):
            number = (thread * turn) % 5
            place = bench.place([(thread, turn)])
            answer = bench.queue.submit(make_unit(number), SIZE, place, wait_s=60.0)
            if isinstance(answer, Refusal):
                wrong.append(answer)
                continue
            if turn % 7 == 3:
                answer.cancel()
            result = answer.finish()
            if result.ready:
                ready[thread] += 1
                if not holds(place, make_unit(number)):
                    wrong.append(number)
                bench.arena.release(place.grants[0])
            elif result.outcome is not TransferOutcome.CANCELLED:
                wrong.append(result)

    with TransferWorkers(bench.queue, 3):
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert sum(ready) >= 6 * 51
    assert bench.balanced()
    totals = bench.queue.totals
    assert totals.requests == 360
    assert totals.ready + totals.cancelled == 360
    assert bench.queue.workers == 0


def test_reads_that_are_asked_for_together_are_joined() -> None:
    copier = GatedCopier()
    bench = Bench(copier=copier, clock=time.perf_counter)
    with TransferWorkers(bench.queue, 2):
        waiters = [bench.submit(2)]
        copier.begun.acquire()
        waiters += [bench.submit(2) for _ in range(3)]
        copier.gate.release()
        assert [waiter.finish().ready for waiter in waiters] == [True] * 4
    assert (len(copier.orders), copier.copies) == (1, 3)
    assert all(holds(waiter.destination, make_unit(2)) for waiter in waiters)


def test_a_hung_read_holds_up_nobody_past_the_deadline() -> None:
    copier = GatedCopier()
    bench = Bench(copier=copier, clock=time.perf_counter)
    workers = TransferWorkers(bench.queue, 1)
    workers.start()
    waiter = bench.submit(0, deadline=time.perf_counter() + 0.05)
    assert waiter.finish().outcome is TransferOutcome.LATE
    copier.begun.acquire()
    assert not waiter.settled
    assert workers.stop(0.0) is False
    copier.gate.release()
    assert workers.stop() is True
    assert waiter.settled
    assert bench.balanced()


def test_hung_reads_share_one_deadline_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    copier, now, waits = GatedCopier(), [100.0], list[float]()
    bench = Bench(copier=copier, clock=time.perf_counter)
    workers = TransferWorkers(bench.queue, 3)
    workers.start()
    waiters = [bench.submit(number) for number in range(3)]
    for _ in waiters:
        copier.begun.acquire()

    def join(thread: threading.Thread, timeout: float) -> None:
        waits.append(timeout)
        now[0] += timeout

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        patch.setattr(threading.Thread, "join", join)
        assert workers.stop(10.0) is False
    assert waits == [10.0, 0.0, 0.0]
    for _ in waiters:
        copier.gate.release()
    assert workers.stop() is True


def test_a_wait_for_credits_ends_when_they_come_back() -> None:
    copier = GatedCopier()
    bench = Bench(credits=Credits(SIZE, SIZE, SIZE, 1), copier=copier, clock=time.perf_counter)
    with TransferWorkers(bench.queue, 1):
        first = bench.submit(0)
        copier.begun.acquire()
        refusal = bench.submit(1, wait_s=0.01)
        assert isinstance(refusal, Refusal)
        assert refusal.credit is Credit.PINNED
        assert refusal.waited_s >= 0.01
        threading.Timer(0.02, copier.gate.release, ()).start()
        threading.Thread(target=first.finish).start()
        second = bench.submit(1, wait_s=60.0)
        assert not isinstance(second, Refusal)
        copier.gate.release()
        assert second.finish().ready


def test_a_bug_of_the_copier_ends_no_worker() -> None:
    bench = Bench(clock=time.perf_counter)
    bench.copier.answers.append(ZeroDivisionError("bug"))
    with TransferWorkers(bench.queue, 1):
        broken = bench.submit(0)
        with pytest.raises(ZeroDivisionError):
            broken.finish()
        assert bench.submit(1).finish().ready
    assert bench.balanced(published=1)


def test_no_threads_at_all() -> None:
    with pytest.raises(ConfigurationError, match="threads=0"):
        TransferWorkers(Bench().queue, 0)


OWN = {
    module.__file__
    for module in (
        credit_pool,
        destinations,
        memory,
        transfer_admission,
        transfer_book,
        transfer_landing,
        transfer_state,
        transfers,
    )
}


class InterruptAt:
    """Raises `KeyboardInterrupt` at the n-th line that runs in the modules above.

    Not at a `with`: a trace is also called there on the way out, before the lock is given back, where no signal is ever
    handled.
    """

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in OWN:
            return None
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("scene", ["alone", "shared", "cancelled", "damaged"])
def test_an_interrupt_at_any_line_loses_no_slot_and_no_credit(scene: str) -> None:
    """Whatever was interrupted, `reclaim` of queue and arena gives everything back, and the next request works."""
    line, interrupted = 0, True
    while interrupted:
        line += 1
        bench = Bench(slots=4)
        if scene == "damaged":
            bench.copier.answers.append({"checksum_ok": False})
        interrupted = False
        trace = sys.gettrace()
        sys.settrace(InterruptAt(line))
        try:
            waiters = [bench.submit(1, bench.place(["a", "b"]))]
            if scene != "alone":
                waiters.append(bench.submit(1, bench.place(["c", "d"])))
            if scene == "cancelled":
                waiters[0].cancel()
            for waiter in waiters:
                waiter.finish()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(trace)
        out = bench.queue.reclaim(())
        assert out == [], f"line {line}"
        bench.arena.reclaim(())
        assert bench.balanced(), f"line {line}"
        again = bench.submit(1, bench.place(["a", "b"]))
        bench.copier.answers.clear()
        assert again.finish().ready, f"line {line}"
        assert holds(again.destination, make_unit(1, 2))
    assert line > 300
