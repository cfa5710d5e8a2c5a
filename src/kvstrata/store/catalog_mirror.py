"""What a process remembers of the catalog, so that a look-up costs a dictionary access and three comparisons.

An entry is (context, replica generation, token ids); a chunk that is not remembered is asked of SQLite and remembered.
Removals by any process are noticed through eight bytes of shared memory: odd while one is being committed, one more
after each. What was removed is then read from the catalog. The oldest half goes when the memory is spent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path

from kvstrata.store.file_lock import LockPatience, lock_file
from kvstrata.tiers.filesystem import storage_error

__all__ = ["COUNTER_NAME", "Lookup", "Mirror", "MirrorEntry", "RemovalCounter"]

COUNTER_NAME = "catalog.removals"
_ENTRY_BYTES = 320
"""Keys, tuples and the dictionary's share of one entry, token ids apart; `kvstrata bench store` measures it."""


Mark = tuple[int, int]
"""Which database file, and the last removal in it."""


class Lookup(StrEnum):
    """What a look-up found. Only HIT says that the rows may be asked for; it is not yet an arrival."""

    HIT = "hit"
    MISS = "miss"
    FOREIGN = "foreign"
    TOKENS_DIFFER = "tokens_differ"
    STALE_GENERATION = "stale_generation"
    DELETED = "deleted"


# An attribute of an enum's class costs a third of a look-up.
_HIT = Lookup.HIT


@dataclass(frozen=True, slots=True)
class MirrorEntry:
    """A published chunk as the catalog knows it: digests of context and namespace, generation, packed token ids."""

    context: tuple[bytes, bytes]
    generation: int
    tokens: bytes


class RemovalCounter:
    """Eight bytes below `root` that all processes map. Without the file, or where it cannot be mapped, the count stays
    odd: nothing remembered is trusted then. patience: for others who remove."""

    def __init__(self, root: Path, *, read_only: bool, patience: LockPatience | None = None) -> None:
        self._path = root / COUNTER_NAME
        self._patience = patience or LockPatience()
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._view: memoryview | None = None
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(self._path, flags | os.O_CLOEXEC, 0o666)
            if not read_only and os.fstat(self._fd).st_size < 8:
                os.ftruncate(self._fd, 8)
            # Written as a file: a store into a mapped page that a full disk cannot hold would kill the process.
            self._map = mmap.mmap(self._fd, 8, access=mmap.ACCESS_READ)
            self._view = memoryview(self._map).cast("Q")
        except (OSError, ValueError):
            if not read_only:
                raise

    @property
    def cell(self) -> memoryview | list[int]:
        """What to read as `cell[0]`."""
        return self._view if self._view is not None else [1]

    @contextlib.contextmanager
    def guard(self) -> Iterator[Callable[[], None]]:
        """Around every transaction that may remove, over all processes; blocks, no longer than its patience. It calls
        what this yields before it commits a removal.

        Errors: `StoreError` with STORE_BUSY when the time is up; of that call: where the disk does not take the count.
        """
        with self._lock:
            assert self._fd is not None
            assert self._view is not None
            fd, view, announced = self._fd, self._view, False

            def announce() -> None:
                nonlocal announced
                try:
                    _store(fd, view[0] | 1)
                except OSError as error:
                    raise storage_error(error, "counting a removal") from error
                announced = True

            lock_file(fd, fcntl.LOCK_EX, self._path, self._patience)
            try:
                yield announce
            finally:
                if announced:
                    # Where it cannot be written the count stays odd, and nothing remembered is trusted.
                    with contextlib.suppress(OSError):
                        _store(fd, (view[0] + 1) % 2**64)
                fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unmap. Idempotent."""
        with self._lock:
            if self._view is not None:
                self._view.release()
                self._map.close()
                self._view = None
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def _store(fd: int, count: int) -> None:
    if os.pwrite(fd, count.to_bytes(8, sys.byteorder), 0) != 8:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Mirror:
    """At most about `limit_bytes` of remembered entries. Safe for several threads.

    fetch: asks the catalog for one chunk. removed_since: names removed after a mark, or `None` when it cannot tell, and
    the new mark.
    """

    def __init__(
        self,
        counter: RemovalCounter,
        fetch: Callable[[bytes], MirrorEntry | Lookup],
        removed_since: Callable[[Mark | None], tuple[Iterable[bytes] | None, Mark]],
        limit_bytes: int,
    ) -> None:
        self._cell = counter.cell
        self._fetch = fetch
        self._removed_since = removed_since
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: dict[bytes, tuple[tuple[bytes, bytes], int, bytes]] = {}
        self._contexts: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
        self._bytes = 0
        self._mark = removed_since(None)[1]
        self._seen = -1

    def lookup(
        self, chunk: bytes, context: bytes, namespace: bytes, tokens: bytes, generation: int | None = None
    ) -> Lookup:
        """Whether `chunk` is published as exactly this: digests, packed token ids, and generation when given.

        A memory access where it is remembered; otherwise one query, which blocks. Errors: `StoreError`.
        """
        if self._cell[0] != self._seen:
            self._refresh()
        entry = self._entries.get(chunk)
        if entry is None:
            found = self._remember(chunk)
            if isinstance(found, Lookup):
                return found
            entry = found
        known, at, ids = entry
        if known[0] != context or known[1] != namespace:
            return Lookup.FOREIGN
        if ids != tokens:
            return Lookup.TOKENS_DIFFER
        if generation is not None and generation != at:
            return Lookup.STALE_GENERATION
        return _HIT

    def published(self, chunk: bytes) -> bool:
        """Whether `chunk` is published at all. As `lookup`."""
        if self._cell[0] != self._seen:
            self._refresh()
        return chunk in self._entries or not isinstance(self._remember(chunk), Lookup)

    def forget(self, chunk: bytes) -> None:
        """Ask again for `chunk` next time."""
        with self._lock:
            self._drop(chunk)

    def clear(self) -> None:
        """Ask again for everything next time."""
        with self._lock:
            self._entries = {}
            self._bytes = 0
            self._seen = -1

    def __len__(self) -> int:
        return len(self._entries)

    def _remember(self, chunk: bytes) -> tuple[tuple[bytes, bytes], int, bytes] | Lookup:
        # Under the lock, so that no removal can be taken note of between the query and the entry.
        with self._lock:
            found = self._fetch(chunk)
            if isinstance(found, Lookup):
                return found
            known = self._contexts.setdefault(found.context, found.context)
            entry = (known, found.generation, found.tokens)
            if chunk not in self._entries:
                self._bytes += _ENTRY_BYTES + len(found.tokens)
            self._entries[bytes(chunk)] = entry
            if self._bytes > self.limit_bytes:
                self._halve()
            return entry

    def _refresh(self) -> None:
        with self._lock:
            before = self._cell[0]
            names, self._mark = self._removed_since(self._mark)
            if names is None:
                self._entries = {}
                self._bytes = 0
            else:
                for chunk in names:
                    self._drop(chunk)
            # An odd count: somebody is committing, or died while it did; ask again every time until it is even.
            self._seen = -1 if before % 2 else before

    def _drop(self, chunk: bytes) -> None:
        entry = self._entries.pop(chunk, None)
        if entry is not None:
            self._bytes -= _ENTRY_BYTES + len(entry[2])

    def _halve(self) -> None:
        self._entries = dict(islice(self._entries.items(), len(self._entries) // 2 + 1, None))
        self._bytes = sum(_ENTRY_BYTES + len(entry[2]) for entry in self._entries.values())
