"""A file system that fails on purpose, below the checksums: what it does to bytes must be found by who reads them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.tiers.fault_plan import Fault, FaultInjector
from kvstrata.tiers.filesystem import FileSystem

__all__ = ["FaultyFiles"]

_ANY = frozenset({Fault.DELAY, Fault.HANG, Fault.DIE})
_NAMES = _ANY | {Fault.LOSE, Fault.FILL_UP}
_READ = _ANY | {Fault.SHORTEN, Fault.CORRUPT, Fault.LOSE, Fault.DUPLICATE}
_WRITE = _ANY | {Fault.SHORTEN, Fault.CORRUPT, Fault.LOSE, Fault.DUPLICATE, Fault.REORDER, Fault.FILL_UP}
# A corrupt read of a corrupt write must not be right again.
_READ_BIT, _WRITTEN_BIT = 1, 2
_SYNC = _ANY | {Fault.LOSE, Fault.DUPLICATE}


class FaultyFiles:
    """`files` with faults. Operations are named like its methods.

    Reads: SHORTEN ends the file early, once; CORRUPT flips a bit of what is returned; LOSE fails with EIO. Writes:
    SHORTEN writes fewer bytes and says so; CORRUPT writes another bit; LOSE writes nothing and claims all; REORDER
    writes before the next call on the same file. LOSE of `link` and `replace` publishes nothing and claims success, of
    syncs it does nothing. FILL_UP is ENOSPC.
    """

    def __init__(self, files: FileSystem, injector: FaultInjector) -> None:
        self.files = files
        self.injector = injector
        self._held: dict[int, Callable[[], object]] = {}
        self._ended: dict[int, int] = {}

    def open(self, path: Path, flags: int, /) -> int:
        fault = self.injector.next("open", _NAMES if flags & os.O_CREAT else _ANY | {Fault.LOSE})
        if fault is Fault.LOSE and not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, "injected: the file is gone", str(path))
        _refuse_if_full(fault)
        return self.files.open(path, flags)

    def close(self, fd: int, /) -> None:
        """Closes in any case: a dead process has no open files either."""
        self._ended.pop(fd, None)
        try:
            self._catch_up(fd)
            self.injector.next("close", _ANY)
        finally:
            self.files.close(fd)

    def size(self, fd: int, /) -> int:
        self._catch_up(fd)
        self.injector.next("size", _ANY)
        return self.files.size(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        self._catch_up(fd)
        if self._ended.get(fd) == offset:
            del self._ended[fd]
            return 0
        fault = self.injector.next("preadv", _READ)
        if fault is Fault.LOSE:
            raise OSError(errno.EIO, "injected: the sector cannot be read")
        if fault is Fault.DUPLICATE:
            self.files.preadv(fd, buffers, offset)
        done = self.files.preadv(fd, buffers, offset)
        if fault is Fault.CORRUPT and done:
            _flip(buffers, done // 2, _READ_BIT)
        if fault is Fault.SHORTEN:
            done //= 2
            self._ended[fd] = offset + done
            if not done:
                del self._ended[fd]
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        self._catch_up(fd)
        fault = self.injector.next("pwritev", _WRITE)
        total = sum(buffer.nbytes for buffer in buffers)
        _refuse_if_full(fault)
        if fault is Fault.LOSE:
            return total
        if fault is Fault.REORDER:
            copy = memoryview(b"".join(buffers))
            self._held[fd] = lambda: _write_all(self.files, fd, copy, offset)
            return total
        if fault in (Fault.CORRUPT, Fault.SHORTEN):
            raw = bytearray(b"".join(buffers))
            if fault is Fault.CORRUPT:
                _flip([memoryview(raw)], total // 2, _WRITTEN_BIT)
            else:
                del raw[max(1, total // 2) :]
            return _write_all(self.files, fd, memoryview(raw), offset)
        if fault is Fault.DUPLICATE:
            self.files.pwritev(fd, buffers, offset)
        return self.files.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, length: int, /) -> None:
        _refuse_if_full(self.injector.next("allocate", _ANY | {Fault.FILL_UP}))
        self.files.allocate(fd, length)

    def fdatasync(self, fd: int, /) -> None:
        self._catch_up(fd)
        self._repeat("fdatasync", lambda: self.files.fdatasync(fd))

    def sync_directory(self, path: Path, /) -> None:
        self._repeat("sync_directory", lambda: self.files.sync_directory(path))

    def makedirs(self, path: Path, /) -> None:
        _refuse_if_full(self.injector.next("makedirs", _ANY | {Fault.FILL_UP}))
        self.files.makedirs(path)

    def link(self, source: Path, target: Path, /) -> None:
        fault = self.injector.next("link", _NAMES)
        _refuse_if_full(fault)
        if fault is not Fault.LOSE:
            self.files.link(source, target)

    def replace(self, source: Path, target: Path, /) -> None:
        fault = self.injector.next("replace", _NAMES)
        _refuse_if_full(fault)
        if fault is not Fault.LOSE:
            self.files.replace(source, target)

    def unlink(self, path: Path, /) -> None:
        self.injector.next("unlink", _ANY)
        self.files.unlink(path)

    def _repeat(self, operation: str, call: Callable[[], None]) -> None:
        fault = self.injector.next(operation, _SYNC)
        times = {Fault.LOSE: 0, Fault.DUPLICATE: 2}.get(fault, 1) if fault is not None else 1
        for _ in range(times):
            call()

    def _catch_up(self, fd: int) -> None:
        held = self._held.pop(fd, None)
        if held is not None and not self.injector.dead:
            held()


def _refuse_if_full(fault: Fault | None) -> None:
    if fault is Fault.FILL_UP:
        raise OSError(errno.ENOSPC, "injected: no space left on the device")


def _flip(buffers: Sequence[memoryview], position: int, bit: int) -> None:
    for buffer in buffers:
        if position < buffer.nbytes:
            buffer.cast("B")[position] ^= bit
            return
        position -= buffer.nbytes


def _write_all(files: FileSystem, fd: int, raw: memoryview, offset: int) -> int:
    total = 0
    while total < raw.nbytes:
        total += files.pwritev(fd, [raw[total:]], offset + total)
    return total
