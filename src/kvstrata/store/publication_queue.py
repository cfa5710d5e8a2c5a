"""The bounded queue of one writing direction: chunks that have credits, in order, and behind them those that have none.

A chunk is charged for its whole way: host memory that its bytes are read through, room at the destination, the link's
window, and an entry of the queue. Credits come back once, when its write has ended in whatever way; whoever waited
longest gets them. What waits takes nothing but the slots that it is in already, so that the arena bounds it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.cost.credits import Credit, Credits, shortage
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.ports import Clock
from kvstrata.store.credit_pool import CreditPool, Reservation
from kvstrata.store.directory import ChunkRecord
from kvstrata.tiers.memory import Grant

__all__ = ["Job", "PublicationQueue", "Submission", "chunk_credits"]


class Submission(StrEnum):
    """What became of a chunk that was submitted.

    QUEUED: it has credits and will be written. WAITING: it has none, stays in memory, and is queued when some come
    back. KNOWN: it is published, or was submitted before.
    """

    QUEUED = "queued"
    WAITING = "waiting"
    KNOWN = "known"


@dataclass(eq=False, slots=True)
class Job:
    """One chunk to write. held: its slots. credits: what it holds, or `None`. since: when it began to wait for them."""

    record: ChunkRecord
    held: list[Grant]
    credits: Reservation | None = None
    since: float = 0.0


def chunk_credits(nbytes: int) -> Credits:
    """What writing a chunk of `nbytes` in slots takes."""
    return Credits(nbytes, nbytes, nbytes, 1)


class PublicationQueue:
    """Jobs of one `Publisher`, each of `job_bytes`. Thread-safe: `lock` is held by whoever changes anything.

    credits: what may be on its way at once. changed: told when a job was admitted or has ended. jobs: everything that
    has not ended, oldest first. waited, waited_s: jobs that had to wait for credits, and how long those did that have
    them by now.
    Errors: `ConfigurationError` when not even one job fits `credits`.
    """

    def __init__(self, credits: Credits, job_bytes: int, clock: Clock) -> None:  # noqa: A002 - the word of the field
        self._cost = chunk_credits(job_bytes)
        short = shortage(credits, self._cost)
        if short is not None:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"publish_credits={credits} lack {short}: writing one chunk takes {self._cost}",
                "give the credits of one chunk at least, or make chunks smaller",
            )
        self.pool = CreditPool(credits)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.jobs: dict[Job, None] = {}
        self.waited = 0
        self.waited_s = 0.0
        self._clock = clock
        self._admitted: deque[Job] = deque()
        self._waiting: deque[Job] = deque()

    @property
    def waiting(self) -> int:
        """Jobs without credits now."""
        return len(self._waiting)

    def holds(self, record: ChunkRecord) -> bool:
        """Whether a job of this record has not ended."""
        with self.lock:
            return any(job.record is record for job in self.jobs)

    def enter(self, job: Job) -> Submission:
        """Queue a job, or let it wait behind all that wait already. Does not block."""
        with self.lock:
            self.jobs[job] = None
            if not self._waiting and self._charge(job) is None:
                self._admitted.append(job)
                self.changed.notify_all()
                return Submission.QUEUED
            job.since = self._clock()
            self.waited += 1
            self._waiting.append(job)
            return Submission.WAITING

    def withdraw(self, job: Job) -> None:
        """Take a job back that nobody has begun, after an interrupt on its way in."""
        with self.lock:
            for line in (self._admitted, self._waiting):
                if job in line:
                    line.remove(job)
            self.end(job)

    def take(self) -> Job | None:
        """The next job that has credits, or `None`. Whoever takes it must `end` it once."""
        with self.lock:
            return self._admitted.popleft() if self._admitted else None

    def put_back(self, job: Job) -> None:
        """`job` was taken and is to be the next again."""
        with self.lock:
            self._admitted.appendleft(job)

    def end(self, job: Job) -> None:
        """Give the job's credits back, once, and queue those that waited for them. Repeating it changes nothing."""
        with self.lock:
            if job.credits is not None:
                self.pool.give_back(job.credits)
                job.credits = None
            self.jobs.pop(job, None)
            self._admit()
            self.changed.notify_all()

    def reclaim(self) -> int:
        """After an interruption: give back credits that no job is known to hold; returns how many. Does not block."""
        with self.lock:
            lost = self.pool.reclaim(lambda owner: owner not in self.jobs)
            self._admit()
            self.changed.notify_all()
            return lost

    def _admit(self) -> None:
        while self._waiting and self._charge(self._waiting[0]) is None:
            job = self._waiting.popleft()
            self.waited_s += self._clock() - job.since
            self._admitted.append(job)

    def _charge(self, job: Job) -> Credit | None:
        if job.credits is None:
            taken = self.pool.reserve((job, self._cost))
            if isinstance(taken, Credit):
                return taken
            job.credits = taken[0]
        return None
