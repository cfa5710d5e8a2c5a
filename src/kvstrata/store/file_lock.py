"""`flock` with a deadline, and what its failures mean.

The system's own call waits for ever. It is asked without waiting here, again and again, at first after a millisecond.
"""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.filesystem import storage_error

__all__ = ["LockPatience", "lock_file", "try_lock"]

_FIRST_S = 0.001
_LONGEST_S = 0.02
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class LockPatience:
    """How long a lock is waited for. timeout_s: in seconds of `clock`. sleep: between two attempts."""

    timeout_s: float = 30.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def try_lock(fd: int, operation: int, path: Path) -> bool:
    """Take or give up the lock of the open file without waiting; whether it was granted. Errors: as `lock_file`."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise storage_error(error, f"locking {path}") from error
        raise StoreError(
            Reason.STORE_IO,
            f"the file system gives no lock on {path}: {error.strerror}",
            "put the store on a local disk, or mount the share with locks (NFS: version 4, or a lock service)",
        ) from error
    return True


def lock_file(
    fd: int,
    operation: int,
    path: Path,
    patience: LockPatience,
    holder: Callable[[], str] = lambda: "another process",
) -> None:
    """Take the lock of the open file, LOCK_SH or LOCK_EX; blocks, but no longer than `patience`.

    holder: who has it, in words, asked when the time is up. Errors: `StoreError` with STORE_BUSY then, with STORE_IO
    where the file system has no locks.
    """
    deadline, pause = patience.clock() + patience.timeout_s, _FIRST_S
    while not try_lock(fd, operation, path):
        if patience.clock() >= deadline:
            raise StoreError(
                Reason.STORE_BUSY,
                f"{path} was locked for {patience.timeout_s:g} s by {holder()}",
                "wait for that process to end, or end it, then try again",
            )
        patience.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
