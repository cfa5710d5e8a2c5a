"""Room that is given up when the disk is full, so that a store can be opened and emptied then.

SQLite needs disk space for a log before anything can be removed: without this, nothing could ever be removed from a
disk that has none left.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["BALLAST_BYTES", "BALLAST_NAME", "Ballast"]

BALLAST_NAME = "catalog.ballast"
BALLAST_BYTES = 512 << 10
_LEAST = 64 << 10
_SHARE = 8
"""It is laid down only where that takes less than an eighth of what is free: it must not fill the disk itself."""


class Ballast:
    """The file `catalog.ballast` below `root`. Several processes may lay it down and spend it. Never raises for a disk
    that refuses."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / BALLAST_NAME

    def lay(self) -> None:
        """Make it whole again where the disk has room to spare. Blocks."""
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                space = os.statvfs(self._root)
                wanted = os.fstat(fd).st_size < BALLAST_BYTES
                if wanted and space.f_bavail * space.f_frsize >= _SHARE * BALLAST_BYTES:
                    os.posix_fallocate(fd, 0, BALLAST_BYTES)
            finally:
                os.close(fd)

    def spend(self) -> bool:
        """Give half of what is left back to the disk; whether there was anything. Blocks."""
        try:
            left = self._path.stat().st_size
            if left >= 2 * _LEAST:
                os.truncate(self._path, left // 2)
            else:
                self._path.unlink()
        except OSError:
            return False
        return left > 0
