"""What the file tier is measured against: files as a careful engineer writes them without a store.

A file is one block with the checksums of its segments and of the whole, then the segments. It is written under a
temporary name, synced where that is asked for, read back where that is asked for, and renamed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from blake3 import blake3
from xxhash import xxh3_128_digest

__all__ = ["PlainFiles"]

_BLOCK = 4096
_CHECKSUM_BYTES = 16


class PlainFiles:
    """Files below `root`. durable: fdatasync before the rename and fsync of the directory after it. read_back: every
    segment is read and hashed again before the rename. Errors: `OSError`; `ValueError` for bytes that changed."""

    def __init__(self, root: Path, *, durable: bool, read_back: bool) -> None:
        self._root = root
        self._durable = durable
        self._read_back = read_back
        root.mkdir(parents=True, exist_ok=True)

    def put(self, files: Mapping[str, Sequence[memoryview]]) -> None:
        """Write files, and sync the directory once for all of them. Blocks."""
        for name, segments in files.items():
            self._write(name, segments)
        for name in files:
            self._temporary(name).rename(self._root / name)
        if self._durable:
            folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def get(self, name: str, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers[segment]` and hold each against its checksum. Blocks."""
        self._read(self._root / name, buffers)

    def remove(self, name: str) -> None:
        """Unlink one file."""
        (self._root / name).unlink()

    def _write(self, name: str, segments: Sequence[memoryview]) -> None:
        whole, checksums = blake3(), []
        for segment in segments:
            checksums.append(xxh3_128_digest(segment))
            whole.update(segment)
        block = (b"".join(checksums) + whole.digest()).ljust(_BLOCK, b"\0")
        temporary = self._temporary(name)
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            buffers = [memoryview(block), *segments]
            if os.pwritev(fd, buffers, 0) != sum(each.nbytes for each in buffers):
                raise OSError(f"{temporary} was not written whole")
            if self._durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        if self._read_back:
            scratch = memoryview(bytearray(segments[0].nbytes))
            self._read(temporary, [scratch] * len(segments))

    def _temporary(self, name: str) -> Path:
        return self._root / f"{name}.tmp"

    def _read(self, path: Path, buffers: Sequence[memoryview]) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            block = os.pread(fd, _BLOCK, 0)
            offset = _BLOCK
            for number, buffer in enumerate(buffers):
                done = os.preadv(fd, [buffer], offset)
                wanted = block[number * _CHECKSUM_BYTES : (number + 1) * _CHECKSUM_BYTES]
                if done != buffer.nbytes or xxh3_128_digest(buffer) != wanted:
                    raise ValueError(f"segment {number} of {path} is not what was written")
                offset += done
        finally:
            os.close(fd)
