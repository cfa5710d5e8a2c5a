"""Chunk files that stay open between reads."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvstrata.tiers.interface import ChunkReader, ChunkTier

__all__ = ["OpenChunks"]


class OpenChunks:
    """Open chunk files, the least recently used closed first once nobody reads them. Thread-safe."""

    def __init__(self, tier: ChunkTier, limit: int = 128) -> None:
        self._tier = tier
        self._limit = limit
        self._files: OrderedDict[bytes, ChunkReader] = OrderedDict()
        self._readers: dict[ChunkReader, int] = {}
        self._dropped = 0
        self._lock = threading.Lock()

    def check_out(self, chunk: bytes) -> ChunkReader:
        """The open file, header verified. Errors: as `ChunkTier.open`. Every call needs a `check_in`."""
        with self._lock:
            file, dropped = self._files.get(chunk), self._dropped
            if file is not None:
                return self._use(chunk, file)
        # Not under the lock: a tier that hangs holds up this reader alone.
        opened = self._tier.open(chunk)
        with self._lock:
            file = self._files.get(chunk)
            if file is None:
                file = opened
                if dropped == self._dropped:
                    self._files[chunk] = opened
            self._use(chunk, file)
        if file is not opened:
            opened.close()
        return file

    def check_in(self, file: ChunkReader, /) -> None:
        """End of one reader's use."""
        with self._lock:
            self._readers[file] -= 1
            if not self._readers[file]:
                del self._readers[file]
                if self._files.get(file.identity.digest) is not file:
                    file.close()
            excess = len(self._files) - self._limit
            if excess > 0:
                idle = [name for name, each in self._files.items() if each not in self._readers]
                for name in idle[:excess]:
                    self._files.pop(name).close()

    def forget(self, chunk: bytes) -> None:
        """Never hand this file out again: its bytes were revoked. Whoever reads it now closes it."""
        with self._lock:
            self._dropped += 1
            file = self._files.pop(chunk, None)
            if file is not None and file not in self._readers:
                file.close()

    def close(self) -> None:
        """Close everything."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._dropped += 1

    def _use(self, chunk: bytes, file: ChunkReader) -> ChunkReader:
        if chunk in self._files:
            self._files.move_to_end(chunk)
        self._readers[file] = self._readers.get(file, 0) + 1
        return file
