"""`store.json`: what makes a directory a store, and what keeps kvstrata out of every other directory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.filesystem import NO_HARD_LINKS, FileSystem, storage_error, write_fully

__all__ = ["STORE_FORMAT", "Marker", "prepare", "write_marker"]

STORE_FORMAT = 2
_NAME = "store.json"
_KIND = "kvstrata-store"
_NOT_CONTENT = frozenset({"lost+found"})
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Marker:
    """What `store.json` says. id: names the store in its catalog; empty in format 1, which has none."""

    format: int
    id: str


def prepare(root: Path, *, create: bool, files: FileSystem) -> Marker:
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
        return _check(root)
    if any(name not in _NOT_CONTENT and not name.startswith(f".{_NAME}.") for name in content):
        raise StoreError(
            Reason.STORE_FOREIGN,
            f"{root} holds files but no {_NAME}; it is not a store, and nothing was written to it",
            "name an empty directory or a new path",
        )
    if create:
        return write_marker(root, files)
    raise _missing(root)


def _check(root: Path) -> Marker:
    try:
        marker = json.loads((root / _NAME).read_bytes())
        ours = isinstance(marker, dict) and marker.get("kind") == _KIND and _known(marker)
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
    return Marker(marker["format"], marker.get("id", ""))


def write_marker(root: Path, files: FileSystem, *, upgrade: bool = False) -> Marker:
    """Make `root` a store of the current format, in one step; returns what it is called now. Blocks.

    upgrade: another marker is replaced; otherwise one that is there stays. Errors: `StoreError`.
    """
    marker = Marker(STORE_FORMAT, secrets.token_hex(16))
    temporary = root / f".{_NAME}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = files.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_RDWR)
        try:
            content = json.dumps({"format": marker.format, "id": marker.id, "kind": _KIND}, sort_keys=True) + "\n"
            write_fully(files, fd, [memoryview(content.encode())], 0)
            files.fdatasync(fd)
        finally:
            files.close(fd)
        if upgrade:
            files.replace(temporary, root / _NAME)
        else:
            _publish(temporary, root / _NAME, files)
        files.sync_directory(root)
    except OSError as error:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise storage_error(error, f"creating the store {root}") from error
    return _check(root)


def _publish(temporary: Path, final: Path, files: FileSystem) -> None:
    """Of several processes that create one store at once, the first names it."""
    try:
        files.link(temporary, final)
    except FileExistsError:
        files.unlink(temporary)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        files.replace(temporary, final)
    else:
        files.unlink(temporary)


def _known(marker: dict[str, object]) -> bool:
    version, name = marker.get("format"), marker.get("id")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        return False
    # A newer format may name its stores otherwise.
    return version != STORE_FORMAT or (isinstance(name, str) and _ID.fullmatch(name) is not None)


def _missing(root: Path) -> StoreError:
    return StoreError(
        Reason.STORE_MISSING,
        f"there is no store at {root}",
        "check the path; a session is saved with a store that exists",
    )
