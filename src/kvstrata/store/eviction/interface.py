"""What every eviction policy answers: which keys should leave first."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvstrata.cost.bounds import require_finite
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["EvictionPolicy", "Key", "Usage", "Victims", "choose_victims"]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Usage(Generic[Key]):
    """What is known of an entry whose single uses were not watched, e.g. of a chunk in a durable store.

    key: a slot, a segment or a chunk. nbytes: its size. created, last_used: seconds of one clock. uses: how often it
    was used, its creation included. saving_s: seconds that one more use saves: recomputing less promoting.
    Errors: `ConfigurationError` for a number that cannot be.
    """

    key: Key
    nbytes: int
    created: float
    last_used: float
    uses: int = 1
    saving_s: float = 1.0

    def __post_init__(self) -> None:
        # One sum first: a store hands in its chunks by the hundred thousand, and all of them are sound.
        if self.nbytes >= 1 and self.uses >= 1 and math.isfinite(self.created + self.last_used + self.saving_s):
            return
        require_finite("Usage.nbytes", self.nbytes, least=1)
        require_finite("Usage.uses", self.uses, least=1)
        for field in ("created", "last_used", "saving_s"):
            require_finite(f"Usage.{field}", getattr(self, field), least=float("-inf"))


@dataclass(frozen=True, slots=True)
class Victims(Generic[Key]):
    """Keys in the order in which they should leave, their bytes, and whether they are as many as were asked for."""

    keys: tuple[Key, ...]
    nbytes: int
    sufficient: bool


class EvictionPolicy(Protocol[Key]):
    """An order of keys by how little is lost with each. Not safe for several threads: its owner's lock guards it.

    Deterministic: the same calls give the same answers. `now`: seconds of the owner's clock; a value below an earlier
    one counts as the latest. `admit`, `touch` and `remove` are O(1) or O(log n) on average.
    Errors of these: `StateError` when `admit` is given a key that is there, or another call one that is not;
    `ConfigurationError` for a size that is not positive.
    """

    def __len__(self) -> int: ...

    def __contains__(self, key: Key) -> bool: ...

    def admit(self, key: Key, nbytes: int, now: float, saving_s: float = 1.0) -> None:
        """Take up a key that was just made, which is its first use. nbytes: its size. saving_s: as in `Usage`."""
        ...

    def restore(self, usages: Iterable[Usage[Key]]) -> None:
        """Take up keys with a past, in any order, into a policy that is empty. O(n log n)."""
        ...

    def touch(self, key: Key, now: float) -> None:
        """Count a use of `key`."""
        ...

    def remove(self, key: Key) -> None:
        """Forget `key`: it was evicted, or is gone for another reason."""
        ...

    def victims(self, *, count: int = 0, nbytes: int = 0, pinned: Callable[[Key], bool] | None = None) -> Victims[Key]:
        """The first keys to leave, without those that are `pinned`: at least `count` of them and at least `nbytes`
        bytes, or all there are. Nothing is removed, and `pinned` must not call the policy. O((k + p) log n) for k
        victims that stand behind p pinned keys.

        Errors: `ConfigurationError` unless one of both is positive and neither negative.
        """
        ...


def choose_victims(
    order: Iterator[tuple[Key, int]], count: int, nbytes: int, pinned: Callable[[Key], bool] | None
) -> Victims[Key]:
    """Walk (key, bytes) in `order` until `count` keys and `nbytes` bytes are reached. Errors: as `victims`."""
    if count < 0 or nbytes < 0 or count == nbytes == 0:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"count={count} and nbytes={nbytes}: one must be positive, and neither negative"
        )
    keys: list[Key] = []
    total = 0
    for key, size in order:
        if pinned is not None and pinned(key):
            continue
        keys.append(key)
        total += size
        if len(keys) >= count and total >= nbytes:
            return Victims(tuple(keys), total, True)
    return Victims(tuple(keys), total, False)
