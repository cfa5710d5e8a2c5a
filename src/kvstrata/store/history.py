"""The rows of one request: sealed chunks, then an open tail.

Tail rows are mutable and not yet history. When the frontier passes a chunk boundary in all layers, the chunk is
sealed: it gets its name and never changes again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstrata.contract.identity import ChunkContext, ChunkIdentity
from kvstrata.errors import Reason, StateError
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.tiers.memory import Grant

__all__ = ["History", "TailChunk"]

_numbers = itertools.count()


@dataclass(frozen=True)
class TailChunk:
    """Slots of one open chunk, one per layer, published to kernels under `owner` but to nobody else."""

    index: int
    owner: tuple[str, int, int]
    grants: tuple[Grant, ...]


class History:
    """Rows of one sequence and the slots that hold its open tail. Used by one thread.

    token_ids: ids of all rows, or shorter than `frontier` once rows without ids came in (`named` is False then, and
    nothing is sealed any more). chunks: sealed chunks in order. tail: open chunks in order. hold: rows from there on
    may still be taken back (drafts, beams): they are not committed, and neither sealed nor saved; `None` for no such
    rows. approximate_from: rows from there on were computed over a part of those before them, or over such rows, and
    are sealed under another lineage; `None` for none. cut_at: lowest position from which rows were taken back since
    somebody last looked, or `None`.
    """

    def __init__(self, directory: Directory, context: ChunkContext) -> None:
        self.directory = directory
        self.context = context
        self.approximate_from: int | None = None
        self._exact = context
        self.frontier = 0
        self.token_ids: list[int] = []
        self.named = True
        self.hold: int | None = None
        self.cut_at: int | None = None
        self.chunks: list[ChunkRecord] = []
        self.tail: list[TailChunk] = []
        self.version = 0
        self._sealing: ChunkRecord | None = None
        self._gone: list[ChunkRecord | TailChunk] = []
        self._number = next(_numbers)

    @property
    def sealed(self) -> int:
        """Tokens in sealed chunks."""
        return len(self.chunks) * self.context.chunk_tokens

    @property
    def committed(self) -> int:
        """Rows that stay, in tokens."""
        return self.frontier if self.hold is None else min(self.frontier, self.hold)

    def tail_chunks_for(self, rows: int) -> int:
        """Open chunks that are needed once `rows` more rows have come."""
        return max(0, -(-(self.frontier + rows) // self.context.chunk_tokens) - len(self.chunks))

    def extend_tail(self, rows: int) -> bool:
        """Reserve slots for `rows` more rows; False, and nothing reserved, when the arena has too few free ones."""
        arena, layers = self.directory.arena, self.directory.layers
        missing = self.tail_chunks_for(rows) - len(self.tail)
        if missing * layers > arena.free_slots:
            return False
        for _ in range(missing):
            index = len(self.chunks) + len(self.tail)
            owner = ("tail", self._number, index)
            grants = []
            for _layer in range(layers):
                grant = arena.reserve(owner)
                if grant is None:
                    raise StateError(Reason.NOT_COMMITTED, "free slots went away while the tail was extended")
                arena.publish(grant, owner)
                grants.append(grant)
            self.tail.append(TailChunk(index, owner, tuple(grants)))
            self.version += 1
        return True

    def turn_approximate(self, lineage: str) -> None:
        """Rows that are not sealed yet, and all that come, have `lineage`, until they are taken back.

        Call it before the first of them is committed. Nothing to do where such rows came before.
        """
        if self.approximate_from is None:
            # Signals are not served between these stores.
            self.approximate_from, self.context = self.sealed, replace(self.context, lineage=lineage)

    def commit(self, rows: int, token_ids: Sequence[int] | None) -> list[ChunkRecord]:
        """Move the frontier over `rows` rows that all layers have written; return the chunks sealed by that."""
        if self.tail_chunks_for(rows) > len(self.tail):
            raise StateError(Reason.NOT_COMMITTED, f"{rows} rows were committed without slots for them")
        if token_ids is None:
            self.named = False
        if self.named and token_ids is not None:
            # Ids first: an interruption between the two leaves rows uncommitted, and ids that the next ones replace.
            self.token_ids[self.frontier :] = token_ids
        self.frontier += rows
        return self.settle()

    def settle(self) -> list[ChunkRecord]:
        """Seal what is full. Finishes what an interruption left half done; nothing to do otherwise."""
        self._sweep()
        if not self.named:
            return []
        del self.token_ids[self.frontier :]
        sealed = []
        while self.committed - self.sealed >= self.context.chunk_tokens:
            sealed.append(self._seal())
        return sealed

    def append_stored(self, identity: ChunkIdentity) -> None:
        """Continue the history by a whole chunk that lies in the file tier; the tail must be empty."""
        parent = self.chunks[-1].digest if self.chunks else b""
        if self.tail or self.frontier != identity.start or identity.parent != parent:
            raise StateError(Reason.NOT_COMMITTED, f"a stored chunk at {identity.start} does not continue the history")
        # Ids first, as in `commit`.
        self.token_ids[self.frontier :] = identity.token_ids
        record = self.directory.record(identity, on_file=True)
        # Signals are not served between these stores.
        self.chunks, record.users, self.frontier = [*self.chunks, record], record.users + 1, identity.stop
        self.version += 1

    def tail_identity(self) -> ChunkIdentity | None:
        """Name of the committed part of the open tail, a chunk shorter than usual; `None` when there is none."""
        start = self.sealed
        if self.committed == start:
            return None
        return self._identity(start, self.committed)

    def rewind(self, position: int) -> None:
        """Forget all rows from `position` on, a chunk boundary or a position in the open tail."""
        # A seal that was interrupted would give its name to the rows that come instead.
        self.settle()
        size = self.context.chunk_tokens
        if not 0 <= position <= self.frontier or (position < self.sealed and position % size):
            raise StateError(
                Reason.OPERATION_UNSUPPORTED,
                f"the history ({self.frontier} tokens, {self.sealed} sealed) cannot be cut at {position}",
            )
        keep = min(len(self.chunks), position // size)
        tail = 0 if keep < len(self.chunks) else max(0, -(-position // size) - keep)
        self._cut(position, keep, tail)

    def fork(self) -> History | None:
        """Another history of the same rows: sealed chunks are shared, the open tail is copied.

        `None`, and nothing reserved, when the arena has too few free slots for the copy.
        """
        self.settle()
        other = History(self.directory, self._exact)
        other.approximate_from, other.context = self.approximate_from, self.context
        if len(self.tail) * self.directory.layers > self.directory.arena.free_slots:
            return None
        try:
            self._copy_to(other)
        except BaseException:
            other.close()
            raise
        return other

    @property
    def grants(self) -> list[Grant]:
        """Slots of the open tail, those that are still to be given back included."""
        tails = [*self.tail, *(item for item in self._gone if isinstance(item, TailChunk))]
        return [grant for chunk in tails for grant in chunk.grants]

    def close(self) -> None:
        """Give up all rows. Sealed chunks that others use stay."""
        self.settle()
        self._cut(0, 0, 0)

    def _copy_to(self, other: History) -> None:
        backing = self.directory.arena.backing
        other.hold, other.named, other.token_ids = self.hold, self.named, list(self.token_ids)
        for record in self.chunks:
            # Signals are not served between these stores.
            other.chunks, record.users = [*other.chunks, record], record.users + 1
        other.frontier = other.sealed
        if not other.extend_tail(self.frontier - self.sealed):
            raise StateError(Reason.NOT_COMMITTED, "free slots went away while a history was forked")
        for mine, copy in zip(self.tail, other.tail, strict=False):
            for source, target in zip(mine.grants, copy.grants, strict=True):
                backing.writable(target.slot)[:] = backing.readable(source.slot)
                backing.flush(target.slot)
        other.frontier = self.frontier

    def _cut(self, position: int, chunks: int, tail: int) -> None:
        gone = [*self._gone, *self.chunks[chunks:], *self.tail[tail:]]
        kept = self.chunks[:chunks], self.tail[:tail]
        self.cut_at = position if self.cut_at is None else min(self.cut_at, position)
        # Signals are not served between these stores: rows and slots go together, or not at all.
        self._gone, (self.chunks, self.tail), self.frontier, self.version = gone, kept, position, self.version + 1
        if self.approximate_from is not None and position <= self.approximate_from:
            self.approximate_from, self.context = None, self._exact
        del self.token_ids[position:]
        self._sweep()

    def _sweep(self) -> None:
        """Give back what is no longer part of the history."""
        arena, gone = self.directory.arena, self._gone
        while gone:
            item = gone[-1]
            if isinstance(item, TailChunk):
                for grant in item.grants:
                    # An interrupt may have come in the middle of it.
                    if arena.belongs(grant, item.owner):
                        arena.release(grant)
                gone.pop()
            else:
                self.directory.drop_last(gone)

    def _identity(self, start: int, stop: int) -> ChunkIdentity:
        parent = self.chunks[-1].digest if self.chunks else b""
        return ChunkIdentity(self.context, parent, start, tuple(self.token_ids[start:stop]))

    def _seal(self) -> ChunkRecord:
        start = self.sealed
        record, open_chunk = self._sealing, self.tail[0]
        if record is None:
            record = self.directory.record(self._identity(start, start + self.context.chunk_tokens))
            self._sealing, record.users = record, record.users + 1
        for layer, grant in enumerate(open_chunk.grants):
            self.directory.adopt(record, layer, grant, open_chunk.owner)
        # Signals are not served between these stores: before them the seal can be repeated, after them it is done.
        self.chunks, self.tail, self._sealing = [*self.chunks, record], self.tail[1:], None
        self.version += 1
        return record
