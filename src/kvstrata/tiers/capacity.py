"""A hard cap on the bytes of a durable tier, counted over all processes that write to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstrata.errors import ConfigurationError, Reason, StoreError

__all__ = ["Capacity"]


class Capacity:
    """At most `max_bytes` of file sizes below `root`: published, temporary and damaged files, and manifests.

    Errors: `ConfigurationError` unless `max_bytes` is positive.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"max_bytes={max_bytes} must be positive")
        self.root = root
        self.max_bytes = max_bytes

    @contextlib.contextmanager
    def reserving(self, size: int) -> Iterator[None]:
        """Hold other reservations back while the body gives a file below `root` its `size` bytes; blocks that long.

        Errors: `StoreError` with STORE_FULL when the cap would be passed; the body is not entered then.
        """
        fd = os.open(self.root / "lock.space", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            used = self.used()
            if used + size > self.max_bytes:
                raise StoreError(
                    Reason.STORE_FULL,
                    f"{size} bytes more would pass the cap of {self.root}: {used} of {self.max_bytes} bytes are used",
                    "raise the cap, or remove sessions with `kvstrata store rm NAME`",
                )
            yield
        finally:
            os.close(fd)

    def used(self) -> int:
        """Bytes of all files below `root`; a file that is being published has two names and counts once."""
        sizes: dict[int, int] = {}
        # Files only ever move along this list, so that one which moves during the count is met at least once.
        stages = ["tmp", "chunks", "damaged"]
        for stage in stages:
            self._measure(self.root / stage, sizes)
        self._measure(self.root, sizes, leave_out=stages)
        return sum(sizes.values())

    @staticmethod
    def _measure(top: Path, sizes: dict[int, int], leave_out: Sequence[str] = ()) -> None:
        for folder, folders, names in os.walk(top):
            if leave_out and Path(folder) == top:
                folders[:] = [name for name in folders if name not in leave_out]
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = (Path(folder) / name).stat()
                    sizes[status.st_ino] = status.st_size
