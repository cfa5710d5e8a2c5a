"""Headers that were verified before, so that a file which is opened again is compared instead of parsed."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvstrata.tiers.chunk_format import Header

__all__ = ["HeaderCache"]


class HeaderCache:
    """The latest `limit` verified headers, each with its bytes. Thread-safe.

    A file is taken for verified only when all bytes of its header are those that were.
    """

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._known: OrderedDict[bytes, tuple[bytes, Header]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, chunk: bytes, start: bytes, file_bytes: int) -> Header | None:
        """The header of `chunk`, if a file of `file_bytes` bytes that begins with `start` carries the one that is
        remembered."""
        with self._lock:
            known = self._known.get(chunk)
            if known is None:
                return None
            self._known.move_to_end(chunk)
        raw, header = known
        return header if start.startswith(raw) and header.file_bytes == file_bytes else None

    def keep(self, chunk: bytes, raw: bytes, header: Header) -> None:
        """Remember what was verified."""
        with self._lock:
            self._known[chunk] = (raw, header)
            self._known.move_to_end(chunk)
            if len(self._known) > self._limit:
                self._known.popitem(last=False)

    def forget(self, chunk: bytes) -> None:
        """Verify anew next time."""
        with self._lock:
            self._known.pop(chunk, None)
