"""`store.json`: what makes a directory a store, and what keeps kvstrata out of every other directory."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.filesystem import FileSystem, storage_error, write_fully

__all__ = ["STORE_FORMAT", "prepare"]

STORE_FORMAT = 1
_NAME = "store.json"
_KIND = "kvstrata-store"
_NOT_CONTENT = frozenset({"lost+found"})


def prepare(root: Path, *, create: bool, files: FileSystem) -> None:
    """Make sure that `root` is a store of a format that this version reads; make one where nothing is.

    Errors: `StoreError` with STORE_MISSING, STORE_NOT_A_DIRECTORY, STORE_FOREIGN, STORE_FORMAT_NEWER, or what the
    system refuses.
    """
    try:
        if not root.exists() and not root.is_symlink():
            if not create:
                raise _missing(root)
            files.makedirs(root)
        content = {path.name for path in root.iterdir()}
    except (NotADirectoryError, FileExistsError) as error:
        raise StoreError(
            Reason.STORE_NOT_A_DIRECTORY, f"{root} is not a directory", "name a directory for the store, or a new path"
        ) from error
    except StoreError:
        raise
    except OSError as error:
        raise storage_error(error, f"opening the store {root}") from error
    if _NAME in content:
        _check(root)
    elif any(name not in _NOT_CONTENT and not name.startswith(f".{_NAME}.") for name in content):
        raise StoreError(
            Reason.STORE_FOREIGN,
            f"{root} holds files but no {_NAME}; it is not a store, and nothing was written to it",
            "name an empty directory or a new path",
        )
    elif create:
        _create(root, files)
    else:
        raise _missing(root)


def _check(root: Path) -> None:
    try:
        marker = json.loads((root / _NAME).read_bytes())
        ours = isinstance(marker, dict) and marker.get("kind") == _KIND and isinstance(marker.get("format"), int)
    except ValueError:
        ours = False
    except OSError as error:
        raise storage_error(error, f"reading {root / _NAME}") from error
    if not ours:
        raise StoreError(
            Reason.STORE_FOREIGN,
            f"{root / _NAME} is not the marker of a store; nothing was written to {root}",
            "name another directory; if this was a store, its marker is damaged: save the sessions anew elsewhere",
        )
    if marker["format"] > STORE_FORMAT:
        raise StoreError(
            Reason.STORE_FORMAT_NEWER,
            f"{root} has format {marker['format']}; this version reads up to {STORE_FORMAT}",
            "upgrade kvstrata, or use another directory",
        )


def _create(root: Path, files: FileSystem) -> None:
    temporary = root / f".{_NAME}.{os.getpid()}"
    try:
        fd = files.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_RDWR)
        try:
            content = json.dumps({"format": STORE_FORMAT, "kind": _KIND}, sort_keys=True) + "\n"
            write_fully(files, fd, [memoryview(content.encode())], 0)
            files.fdatasync(fd)
        finally:
            files.close(fd)
        files.replace(temporary, root / _NAME)
        files.sync_directory(root)
    except OSError as error:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise storage_error(error, f"creating the store {root}") from error


def _missing(root: Path) -> StoreError:
    return StoreError(
        Reason.STORE_MISSING,
        f"there is no store at {root}",
        "check the path; a session is saved with a store that exists",
    )
