"""Two hops: a secondary tier is read into host memory, and host memory is copied to where kernels read.

Each hop has a queue, credits and a destination of its own; the second hop's are asked for when the first has landed, by
whichever thread found out. Source: hierarchical K/V memory, section 0x08G.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable

from kvstrata.store.destinations import Destination
from kvstrata.store.transfer_records import Refusal, TransferOutcome, TransferResult, UnitKey
from kvstrata.store.transfer_state import Waiter
from kvstrata.store.transfers import TransferQueue

__all__ = ["StagedTransfer"]


class StagedTransfer:
    """One unit on its way over two queues. The owner calls `start`, then `finish` or `cancel`.

    stage: reserved host slots for the first hop. final: the destination. second_unit: what the second hop reads, with
    the host as its source. staged(): called once the host's copy is of no more use to this transfer. Both destinations
    are the transfer's from `start` on, unless that refuses.
    """

    def __init__(
        self,
        first: TransferQueue,
        second: TransferQueue,
        unit: UnitKey,
        second_unit: UnitKey,
        nbytes: int,
        stage: Destination,
        final: Destination,
        *,
        deadline: float = math.inf,
        staged: Callable[[], None] = lambda: None,
    ) -> None:
        self._first = first
        self._second = second
        self._unit = unit
        self._second_unit = second_unit
        self._nbytes = nbytes
        self._stage = stage
        self._final = final
        self._deadline = deadline
        self._staged = staged
        self._lock = threading.Lock()
        self._hop: Waiter | None = None
        self._next: Waiter | Refusal | None = None
        self._landed: TransferResult | None = None
        self._result: TransferResult | None = None
        self._cancelled = False
        self._returned = False
        self._left = False

    def start(self, wait_s: float = 0.0) -> Refusal | None:
        """Admit the first hop; `None` when it is on its way. Does not block but for `wait_s`."""
        answer = self._first.submit(
            self._unit, self._nbytes, self._stage, deadline=self._deadline, wait_s=wait_s, then=self._advance
        )
        if isinstance(answer, Refusal):
            return answer
        self._hop = answer
        return None

    def finish(self) -> TransferResult | Refusal:
        """Wait for both hops. A second hop that finds no credits is a `Refusal`, with nothing left behind. Blocks."""
        if self._result is not None:
            return self._result
        assert self._hop is not None
        first = self._hop.finish()
        self._advance(self._hop)
        following = self._next
        if isinstance(following, Refusal):
            return following
        if following is None:
            self._give_back_final()
            self._result = first
            return first
        second = following.finish()
        receipt = dataclasses.replace(
            second.receipt,
            direction=f"{self._first.direction}, {self._second.direction}",
            queue_s=first.receipt.queue_s + second.receipt.queue_s,
            service_s=first.receipt.service_s + second.receipt.service_s,
            stages=(first.receipt, second.receipt),
        )
        self._result = TransferResult(second.outcome, receipt, second.error)
        self._leave_stage()
        return self._result

    def cancel(self) -> None:
        """Give up whichever hop is under way. Idempotent; does not block."""
        with self._lock:
            self._cancelled = True
        if self._hop is not None:
            self._hop.cancel()
        if isinstance(self._next, Waiter):
            self._next.cancel()
            self._leave_stage()
        else:
            self._give_back_final()

    def _advance(self, hop: Waiter) -> None:
        """Publish the host's copy and ask for the second hop; once, whoever comes first."""
        with self._lock:
            if self._next is not None or self._cancelled:
                return
            result = hop.poll()
            if result is None or result.outcome is not TransferOutcome.READY:
                return
            self._next = self._second.submit(self._second_unit, self._nbytes, self._final, deadline=self._deadline)
            refused = isinstance(self._next, Refusal)
        if refused:
            self._give_back_final()
            self._leave_stage()

    def _leave_stage(self) -> None:
        with self._lock:
            if self._left:
                return
            self._left = True
        self._staged()

    def _give_back_final(self) -> None:
        with self._lock:
            if self._returned or isinstance(self._next, Waiter):
                return
            self._returned = True
        self._final.release()
