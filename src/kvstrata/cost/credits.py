"""What a transfer must be given before it may start, and how long it would take: pure arithmetic.

Four resources bound the bytes on their way: pinned host memory, staging at the destination, the window of the link, and
the entries of the read queue. A set of requests is admitted when

    backend bytes of its distinct units     <= min(pinned free, link free)
    staging summed over every request       <= staging free
    number of requests                      <= queue entries free

A unit that several requests share is read once; each of them has a destination of its own.
Source: hierarchical K/V memory, sections 0x08H and 0x08L.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.errors import ConfigurationError, Reason

__all__ = ["Credit", "Credits", "Demand", "PathRate", "charge", "estimate", "shortage"]


class Credit(StrEnum):
    """The resource that ran out."""

    PINNED = "pinned"
    STAGING = "staging"
    LINK = "link"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class Credits:
    """An amount of each resource: bytes of pinned host memory, of destination staging and of the link's window, and
    entries of the queue.

    Errors: `ConfigurationError` for a negative amount, also as the result of a subtraction.
    """

    pinned: int = 0
    staging: int = 0
    link: int = 0
    queue: int = 0

    def __post_init__(self) -> None:
        if self.pinned < 0 or self.staging < 0 or self.link < 0 or self.queue < 0:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"credits cannot be negative: {self}")

    def __add__(self, other: Credits) -> Credits:
        return Credits(
            self.pinned + other.pinned,
            self.staging + other.staging,
            self.link + other.link,
            self.queue + other.queue,
        )

    def __sub__(self, other: Credits) -> Credits:
        return Credits(
            self.pinned - other.pinned,
            self.staging - other.staging,
            self.link - other.link,
            self.queue - other.queue,
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """One request: the immutable unit it reads, that unit's bytes, and the bytes staged at its own destination."""

    unit: Hashable
    backend_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class PathRate:
    """A measured path. setup_s: seconds before the first byte. bytes_per_s: service rate as measured, not a data
    sheet's. numa_s: seconds more when source and worker sit on different nodes.

    Errors: `ConfigurationError` unless the rate is positive and the times are not negative.
    """

    setup_s: float
    bytes_per_s: float
    numa_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.setup_s >= 0 or not self.numa_s >= 0:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"a path needs a positive rate and times of at least 0: {self}"
            )


def charge(demands: Iterable[Demand]) -> Credits:
    """What a set of requests takes: backend bytes once for every unit, staging and a queue entry for every request.

    Errors: `ConfigurationError` when two requests of one unit disagree about its bytes.
    """
    units: dict[Hashable, int] = {}
    staging = count = 0
    for demand in demands:
        known = units.setdefault(demand.unit, demand.backend_bytes)
        if known != demand.backend_bytes:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"unit {demand.unit!r} has {known} bytes and {demand.backend_bytes} bytes"
            )
        staging += demand.staging_bytes
        count += 1
    backend = sum(units.values())
    return Credits(backend, staging, backend, count)


def shortage(free: Credits, wanted: Credits) -> Credit | None:
    """The first resource of which `free` has less than `wanted`, or `None` when all of it can be given."""
    if wanted.pinned > free.pinned:
        return Credit.PINNED
    if wanted.link > free.link:
        return Credit.LINK
    if wanted.staging > free.staging:
        return Credit.STAGING
    if wanted.queue > free.queue:
        return Credit.QUEUE
    return None


def estimate(rate: PathRate, nbytes: int, queue_s: float = 0.0, *, cross_numa: bool = False) -> float:
    """Seconds until `nbytes` have arrived: waiting in the queue, setup, service at the measured rate, NUMA crossing."""
    return queue_s + rate.setup_s + nbytes / rate.bytes_per_s + (rate.numa_s if cross_numa else 0.0)
