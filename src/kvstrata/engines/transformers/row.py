"""One sequence of a request: its rows, and the columns of the caller's tensors that are none of them."""

from __future__ import annotations

from kvstrata.placement.selecting import Selecting
from kvstrata.store.history import History

__all__ = ["Row"]


class Row:
    """A sequence, as the caller's tensors show it: every column is one of its rows, padding, or came after its end.

    history: its rows. padding: columns that the attention mask hid. beyond: columns that came after `generate` had
    finished the sequence. drafting: rows from `history.hold` on are drafts, which the next call or a save keeps.
    restored_tokens: rows that came from a session. frame: what chooses its rows, or `None` where all are read.
    """

    def __init__(self, history: History, frame: Selecting | None = None) -> None:
        self.history = history
        self.frame = frame
        self._debt: tuple[int, list[int]] = (0, [])
        self.padding: list[int] = []
        self.beyond: list[int] = []
        self.finished = False
        self.drafting = False
        self.restored_tokens = 0

    @property
    def owed(self) -> list[int]:
        """Ids of what is owed; nothing once the history has come so far."""
        start, ids = self._debt
        done = self.history.frontier - start
        return ids[done:] if done >= 0 else []

    def owe(self, start: int, ids: list[int]) -> None:
        """The rows from `start` on are to be computed again, as soon as the history has been cut back to there."""
        self._debt = start, ids

    @property
    def frontier(self) -> int:
        """Rows, in tokens. Those that are owed count: the next step computes them first."""
        return self.history.frontier + len(self.owed)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the rows."""
        return self.history.token_ids + self.owed

    @property
    def width(self) -> int:
        """Columns."""
        return self.frontier + len(self.padding) + len(self.beyond)

    def append(self, first: int, hidden: list[int], padding: bool) -> None:
        """Note columns that are no rows: `hidden`, counted from column `first`."""
        (self.padding if padding else self.beyond).extend(first + column for column in hidden)

    def crop(self, width: int) -> None:
        """Take back all columns from `width` on."""
        if width >= self.width:
            return
        padding, beyond = ([c for c in hidden if c < width] for hidden in (self.padding, self.beyond))
        self.rewind(width - len(padding) - len(beyond))
        self.padding, self.beyond = padding, beyond

    def rewind(self, frontier: int) -> None:
        """Take back all rows from `frontier` on. A sealed chunk that is cut is owed again as far as it stays."""
        computed = self.history.frontier
        if frontier >= computed:
            self.owe(computed, self.owed[: frontier - computed])
            return
        self.owe(computed, [])
        if frontier >= self.history.sealed:
            self.history.rewind(frontier)
            return
        boundary = frontier // self.history.context.chunk_tokens * self.history.context.chunk_tokens
        self.owe(boundary, self.history.token_ids[boundary:frontier])
        self.history.rewind(boundary)

    def keep_drafts(self) -> None:
        """What was a draft until now stays."""
        if self.drafting:
            self.drafting, self.history.hold = False, None

    def draft(self, start: int) -> None:
        """Rows from `start` on are drafts until the next call."""
        self.drafting, self.history.hold = True, start

    def hold(self) -> None:
        """Rows from here on belong to a beam, which may be dropped at any step: they are never committed."""
        self.keep_drafts()
        if self.history.hold is None:
            self.history.hold = self.frontier

    def fork(self) -> Row | None:
        """A copy; `None` when there is no memory for its open tail."""
        history = self.history.fork()
        if history is None:
            return None
        other = Row(history, None if self.frame is None else self.frame.fork(history))
        other._debt, other.padding, other.beyond = self._debt, list(self.padding), list(self.beyond)
        other.finished, other.drafting, other.restored_tokens = self.finished, self.drafting, self.restored_tokens
        return other

    def close(self) -> None:
        """Give up all rows."""
        self.owe(0, [])
        self.history.close()
