"""Durable chunks in the order in which they should leave: a policy's, but children before their parents.

A chunk names its parent, and is only reached through it: without the parent its bytes lie there and no look-up finds
them. So only leaves leave. A policy seldom disagrees, because whoever uses a chunk has used its parents too; where it
does, as with chunks that save different times, the lowest-ranked leaf goes first, and a parent's turn comes with its
last child. What is held, or has a descendant that is, never comes, nor does what a chunk continues that is about to be
written.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol

__all__ = ["Hold", "LeafFirst", "StoredChunk"]


class Hold(StrEnum):
    """Why a chunk may not be evicted. FREE: it may. PINNED: a saved session, a lease or a transfer needs it.
    LAST_AUTHORITY: an open request needs its rows, and no other valid replica has them."""

    FREE = "free"
    PINNED = "pinned"
    LAST_AUTHORITY = "last_authority"


class StoredChunk(Protocol):
    """A published chunk as the catalog of a durable tier knows it.

    chunk, parent: digests; the first chunk of a history has no parent, which is the empty string. nbytes: its file,
    header and padding included. created, last_used: seconds of one clock. uses: how often it was used, its creation
    included.
    """

    @property
    def chunk(self) -> bytes: ...

    @property
    def parent(self) -> bytes: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def created(self) -> float: ...

    @property
    def last_used(self) -> float: ...

    @property
    def uses(self) -> int: ...

    @property
    def hold(self) -> Hold: ...


class LeafFirst:
    """Takes leaves one after the other, the lowest-ranked first.

    chunks: all that are published, held ones included. order: names, as the policy ranks them. continued: the
    parent of a chunk that is not published yet.
    """

    def __init__(self, chunks: Iterable[StoredChunk], order: Sequence[bytes], continued: bytes = b"") -> None:
        self._free: dict[bytes, StoredChunk] = {}
        self._children = Counter([continued])
        for one in chunks:
            self._children[one.parent] += 1
            if one.hold is Hold.FREE:
                self._free[one.chunk] = one
        # Whatever the order says, what is held is given no rank, and so never leaves.
        self.ranks = {chunk: rank for rank, chunk in enumerate(order) if chunk in self._free}
        self._leaves = [(rank, chunk) for chunk, rank in self.ranks.items() if not self._children[chunk]]
        heapq.heapify(self._leaves)

    def copy(self) -> LeafFirst:
        """Another one at the same point, to look ahead with."""
        other = LeafFirst.__new__(LeafFirst)
        other._free, other.ranks = self._free, self.ranks
        other._children, other._leaves = self._children.copy(), self._leaves.copy()
        return other

    def take(self) -> StoredChunk | None:
        """The next leaf, or `None`. Its parent waits until `left` says that it has gone."""
        if not self._leaves:
            return None
        return self._free[heapq.heappop(self._leaves)[1]]

    def left(self, one: StoredChunk) -> None:
        """The chunk that was taken has gone: its parent may be a leaf now."""
        self._children[one.parent] -= 1
        if not self._children[one.parent] and one.parent in self.ranks:
            heapq.heappush(self._leaves, (self.ranks[one.parent], one.parent))

    def drain(self) -> Iterator[StoredChunk]:
        """All that can leave, each as though it had left when the next is asked for."""
        while (one := self.take()) is not None:
            yield one
            self.left(one)
