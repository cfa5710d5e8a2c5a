"""The operating system calls that durable tiers make, as one small protocol, and what their failures mean.

Tests hand in an implementation that fails on purpose; `OsFiles` is the real one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvstrata.errors import Reason, StoreError

__all__ = ["NO_HARD_LINKS", "FileSystem", "OsFiles", "read_fully", "storage_error", "write_fully"]

NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Errors of `link` where a file system has no hard links, or no more of them."""

_IOV_MAX = 1024
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_NO_PLACE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
_NO_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class FileSystem(Protocol):
    """What the durable tiers need from the system. Every call blocks and raises `OSError` as `os` does."""

    def open(self, path: Path, flags: int, /) -> int: ...

    def close(self, fd: int, /) -> None: ...

    def size(self, fd: int, /) -> int: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def allocate(self, fd: int, length: int, /) -> None: ...

    def fdatasync(self, fd: int, /) -> None: ...

    def sync_directory(self, path: Path, /) -> None: ...

    def makedirs(self, path: Path, /) -> None: ...

    def link(self, source: Path, target: Path, /) -> None: ...

    def replace(self, source: Path, target: Path, /) -> None: ...

    def unlink(self, path: Path, /) -> None: ...


class OsFiles:
    """`FileSystem` on the real operating system."""

    close = staticmethod(os.close)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    fdatasync = staticmethod(os.fdatasync)
    link = staticmethod(os.link)
    replace = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)

    def open(self, path: Path, flags: int, /) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def size(self, fd: int, /) -> int:
        return os.fstat(fd).st_size

    def allocate(self, fd: int, length: int, /) -> None:
        """Give the file `length` bytes, so that a full disk is known before the copy where the file system can tell."""
        try:
            os.posix_fallocate(fd, 0, length)
        except OSError as error:
            if error.errno not in _NO_ALLOCATE:
                raise
            os.ftruncate(fd, length)

    def sync_directory(self, path: Path, /) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def makedirs(self, path: Path, /) -> None:
        path.mkdir(parents=True, exist_ok=True)


def write_fully(files: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write all bytes of `buffers` at `offset`, however short the single writes are; returns the bytes written."""
    pending = [buffer for buffer in buffers if buffer.nbytes]
    total = 0
    while pending:
        done = files.pwritev(fd, pending[:_IOV_MAX], offset + total)
        if done <= 0:
            raise OSError(errno.EIO, "the system wrote no bytes")
        total += done
        pending = _advance(pending, done)
    return total


def read_fully(files: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int, length: int) -> int:
    """Fill `buffers`, `length` bytes together, from `offset`; returns the bytes read, fewer only at the file's end."""
    total = files.preadv(fd, buffers, offset) if len(buffers) <= _IOV_MAX else 0
    if total == length:
        return total
    pending = _advance(list(buffers), total)
    while pending:
        done = files.preadv(fd, pending[:_IOV_MAX], offset + total)
        if done <= 0:
            break
        total += done
        pending = _advance(pending, done)
    return total


def storage_error(error: OSError, doing: str) -> StoreError:
    """The refusal that an `OSError` of the system means, with cause and next step; a refusal stays as it is."""
    if isinstance(error, StoreError):
        return error
    text = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreError(
            Reason.STORE_FULL,
            f"no room while {doing}: {text}",
            "free space on the disk or remove sessions with `kvstrata store rm NAME`; what was stored before is intact",
        )
    if error.errno in _READ_ONLY:
        return StoreError(
            Reason.STORE_READ_ONLY,
            f"the system does not permit {doing}: {text}",
            "check the owner, the mode and the mount options of the store's directory, or open it for reading only",
        )
    if error.errno in _NO_PLACE:
        return StoreError(
            Reason.STORE_MISSING,
            f"there is no place for it while {doing}: {text}",
            "check the path: a directory on the way is gone, the name is too long, or the file system makes no "
            "directories, as /proc does",
        )
    return StoreError(
        Reason.STORE_IO,
        f"the disk failed while {doing}: {text}",
        "check the disk and the system log, then try again; `kvstrata store verify` tells what is readable",
    )


def _advance(buffers: list[memoryview], done: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            rest = buffer if not done else buffer.cast("B")[done:]
            return [rest, *buffers[index + 1 :]]
        done -= buffer.nbytes
    return []
