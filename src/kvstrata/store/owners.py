"""Who is alive: every process that writes to a store holds a lock on a file of its own, which ends with the process.

owners/<32 hex>     empty; flock'd for as long as the process named `process:<32 hex>` has the store open
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

__all__ = ["FOLDER", "ProcessMark", "is_alive", "left_marks", "remove_mark"]

FOLDER = "owners"
_PREFIX = "process:"


class ProcessMark:
    """This opener's own file below `root`, locked until `release`. Errors: `OSError`."""

    def __init__(self, root: Path) -> None:
        (root / FOLDER).mkdir(exist_ok=True)
        while True:
            key = secrets.token_hex(16)
            self._path = root / FOLDER / key
            self._fd: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # Whoever cleans up may have met the file before it was locked.
            if self._path.exists():
                break
            os.close(self._fd)
        self.name = _PREFIX + key

    def release(self) -> None:
        """Give the lock and the file back. Idempotent."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = None


def is_alive(root: Path, process: str) -> bool:
    """Whether the process of that name still has the store open, on this machine."""
    path = _path(root, process)
    if path is None:
        return False
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Held, or the file system cannot tell: what a living process needs must not go.
        return True
    finally:
        os.close(fd)
    return False


def left_marks(root: Path) -> list[str]:
    """Names of processes whose file is still there, dead or alive."""
    try:
        return sorted(_PREFIX + path.name for path in (root / FOLDER).iterdir())
    except OSError:
        return []


def remove_mark(root: Path, process: str) -> None:
    """Remove the file of a process, if it is dead and its row is gone."""
    path = _path(root, process)
    if path is not None and not is_alive(root, process):
        with contextlib.suppress(OSError):
            path.unlink()


def _path(root: Path, process: str) -> Path | None:
    key = process.removeprefix(_PREFIX)
    legal = len(key) == 32 and all(letter in "0123456789abcdef" for letter in key)
    return root / FOLDER / key if legal and process.startswith(_PREFIX) else None
