"""Eviction policies as plainly as they can be told, and the sequences of calls on which the real ones must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

KEYS = range(7)

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "touch", "touch", "touch", "remove"]),
        st.sampled_from(KEYS),
        st.integers(0, 40),  # seconds since the call before
        st.integers(1, 5),  # bytes
        st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),  # seconds saved
    ),
    max_size=60,
)


@dataclass
class Entry:
    """All that ever happened to one key: when, and as which call of all."""

    nbytes: int
    saving_s: float
    times: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    counter: int = 0


class Reference:
    """Remembers everything and sorts everything, at each question. `rank(entry, now)`: lowest leaves first."""

    def __init__(self, rank: Callable[[Entry, float], Any], halve_every: int | None = None) -> None:
        self.entries: dict[int, Entry] = {}
        self.rank = rank
        self.halve_every = halve_every
        self.number = 0
        self.uses = 0

    def admit(self, key: int, nbytes: int, now: float, saving_s: float) -> None:
        self.entries[key] = Entry(nbytes, saving_s)
        self.touch(key, now)

    def touch(self, key: int, now: float) -> None:
        self.number += 1
        self.uses += 1
        entry = self.entries[key]
        entry.times.append(now)
        entry.calls.append(self.number)
        entry.counter += 1
        if self.halve_every is not None and self.uses % self.halve_every == 0:
            for each in self.entries.values():
                each.counter //= 2

    def remove(self, key: int) -> None:
        del self.entries[key]

    def order(self, now: float) -> list[int]:
        return sorted(self.entries, key=lambda key: self.rank(self.entries[key], now))

    def victims(self, count: int, nbytes: int, pinned: set[int], now: float) -> tuple[tuple[int, ...], int, bool]:
        taken: list[int] = []
        for key in self.order(now):
            total = sum(self.entries[one].nbytes for one in taken)
            if len(taken) >= count and total >= nbytes:
                break
            if key not in pinned:
                taken.append(key)
        total = sum(self.entries[one].nbytes for one in taken)
        return tuple(taken), total, len(taken) >= count and total >= nbytes


def replay(policy: Any, reference: Reference, calls: list[tuple[str, int, int, int, float]]) -> Any:
    """Make the legal ones of `calls` on both; yields the time after each."""
    now = 0.0
    for name, key, later, nbytes, saving_s in calls:
        now += later
        if (key in reference.entries) == (name == "admit"):
            continue
        if name == "admit":
            policy.admit(key, nbytes, now, saving_s)
            reference.admit(key, nbytes, now, saving_s)
        elif name == "touch":
            policy.touch(key, now)
            reference.touch(key, now)
        else:
            policy.remove(key)
            reference.remove(key)
        yield now


def agree(policy: Any, reference: Reference, calls: list[tuple[str, int, int, int, float]]) -> None:
    """Every question has the same answer after every call."""
    for now in replay(policy, reference, calls):
        assert len(policy) == len(reference.entries)
        assert all((key in policy) == (key in reference.entries) for key in KEYS)
        for count, nbytes, pinned in ((1, 0, set()), (0, 6, {0, 3}), (2, 3, {1}), (len(KEYS) + 1, 0, set())):
            found = policy.victims(count=count, nbytes=nbytes, pinned=pinned.__contains__)
            assert (found.keys, found.nbytes, found.sufficient) == reference.victims(count, nbytes, pinned, now)
