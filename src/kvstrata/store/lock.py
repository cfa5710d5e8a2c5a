"""Who uses a store: every opener shares one lock, and only an opener that is alone may delete.

`lock` is held shared (flock) while a store is open and exclusively while something is deleted. flock gives the shared
lock up before it grants the exclusive one, so `lock.collect` is taken first: no second collector can slip into the gap.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstrata.store.file_lock import LockPatience, lock_file, try_lock

__all__ = ["StoreLock"]


class StoreLock:
    """The two lock files of the store at `root`. Without `create`, files that are not there are not locked."""

    def __init__(self, root: Path, *, create: bool) -> None:
        self._path = root / "lock"
        self._fd = _open(self._path, create)
        try:
            self._collect_fd = _open(root / "lock.collect", create)
        except BaseException:
            self._close(self._fd)
            raise

    def share(
        self,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the shared lock; blocks while somebody deletes, `timeout_s` at most.

        Errors: `StoreError` with STORE_BUSY when the time is up, STORE_IO where the file system has no locks.
        """
        if self._fd is not None:
            patience = LockPatience(timeout_s, clock, sleep)
            lock_file(self._fd, fcntl.LOCK_SH, self._path, patience, lambda: f"{self.describe_holders()}, to delete")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Try to be alone, without waiting; yields whether that was granted. Afterwards the lock is shared again."""
        if self._fd is None or not self._try(self._collect_fd, fcntl.LOCK_EX):
            yield False
            return
        try:
            alone = self._try(self._fd, fcntl.LOCK_EX)
            try:
                if not alone:
                    fcntl.flock(self._fd, fcntl.LOCK_SH)
                yield alone
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_SH)
        finally:
            self._try(self._collect_fd, fcntl.LOCK_UN)

    def holders(self) -> tuple[int, ...]:
        """Process ids that hold the lock, this process aside, as far as the system tells."""
        if self._fd is None:
            return ()
        status = os.fstat(self._fd)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        try:
            lines = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return ()
        fields = [line.split() for line in lines if "FLOCK" in line]
        pids = {int(field[4]) for field in fields if len(field) > 5 and field[5] == place and field[4].isdecimal()}
        return tuple(sorted(pids - {os.getpid()}))

    def describe_holders(self) -> str:
        """Who holds the lock, as words for a message."""
        pids = self.holders()
        return f"process {', '.join(map(str, pids))}" if pids else "another opener, perhaps in this process"

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._close(self._fd)
        self._close(self._collect_fd)
        self._fd = self._collect_fd = None

    def _try(self, fd: int | None, operation: int) -> bool:
        return fd is None or try_lock(fd, operation, self._path)

    @staticmethod
    def _close(fd: int | None) -> None:
        if fd is not None:
            os.close(fd)


def _open(path: Path, create: bool) -> int | None:
    try:
        return os.open(path, (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) | os.O_CLOEXEC, 0o666)
    except OSError:
        if create:
            raise
        return None
