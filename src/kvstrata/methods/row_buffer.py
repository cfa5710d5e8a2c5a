"""Consecutive rows that an index keeps for itself, in one tensor that grows by half of itself."""

from __future__ import annotations

from torch import Tensor

__all__ = ["RowBuffer"]


class RowBuffer:
    """Rows [start, stop) of shape [heads, rows, head_dim], in the dtype and on the device of the first ones.

    start, stop: positions; rows are added at the end and dropped at either.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.stop = start
        self._offset = 0
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, the room to grow included."""
        return 0 if self._memory is None else self._memory.numel() * self._memory.element_size()

    @property
    def rows(self) -> Tensor:
        """All rows, as a view. There must have been some."""
        return self.read(self.start, self.stop)

    def append(self, rows: Tensor) -> None:
        """Copy `rows` [heads, n, head_dim] behind the last."""
        used, count = self.stop - self.start, rows.shape[1]
        if self._memory is None or self._offset + used + count > self._memory.shape[1]:
            room = used + count + used // 2
            memory = rows.new_empty(rows.shape[0], room, rows.shape[2])
            if self._memory is not None:
                memory[:, :used] = self._memory[:, self._offset : self._offset + used]
            self._memory, self._offset = memory, 0
        end = self._offset + used
        self._memory[:, end : end + count] = rows
        self.stop += count

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop), as a view that the next change may invalidate."""
        assert self._memory is not None, "no row has come yet"
        assert self.start <= start <= stop <= self.stop, f"[{start}, {stop}) of [{self.start}, {self.stop})"
        return self._memory[:, start - self.start + self._offset : stop - self.start + self._offset]

    def drop_before(self, start: int) -> None:
        """Forget rows before `start`; their memory is used again when the buffer grows next."""
        ahead = min(max(start, self.start), self.stop) - self.start
        self.start, self._offset = self.start + ahead, self._offset + ahead

    def truncate(self, stop: int) -> None:
        """Forget rows from `stop` on."""
        assert self.start <= stop, f"{stop} lies before {self.start}"
        self.stop = min(self.stop, stop)
