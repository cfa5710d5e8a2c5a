"""Manifests of sessions as the catalog sees them: which there are, how large, and which chunks they name.

What a manifest means is read in `kvstrata.sessions`; here one that is damaged simply pins nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SESSION_PREFIX", "manifest_path", "named_chunks", "session_manifests", "session_owner"]

SESSION_PREFIX = "session:"
_FOLDER = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"([1-9][0-9]{0,17})\.json", re.ASCII)
_OWNER = re.compile(rf"{SESSION_PREFIX}([0-9a-f]{{64}})/([1-9][0-9]{{0,17}})", re.ASCII)
_DIGEST_BYTES = 32


def session_owner(folder: str, sequence: int) -> str:
    """Name under which the snapshot `sequence` in `folder` pins its chunks."""
    return f"{SESSION_PREFIX}{folder}/{sequence}"


def session_manifests(root: Path) -> Iterator[tuple[str, Path]]:
    """Owner name and path of every manifest below `root`, in no particular order."""
    try:
        folders = [path for path in (root / "sessions").iterdir() if _FOLDER.fullmatch(path.name)]
    except FileNotFoundError:
        return
    for folder in folders:
        for path in folder.iterdir():
            if found := _FILE.fullmatch(path.name):
                yield session_owner(folder.name, int(found[1])), path


def manifest_path(root: Path, owner: str) -> Path | None:
    """Where the manifest of a session's owner lies, or `None` for a name that no session has."""
    found = _OWNER.fullmatch(owner)
    return root / "sessions" / found[1] / f"{found[2]}.json" if found else None


def named_chunks(path: Path) -> tuple[bytes, ...]:
    """Digests that the manifest names; none where it cannot be understood."""
    try:
        names = json.loads(path.read_bytes())["snapshot"]["chunks"]
        chunks = tuple(bytes.fromhex(name) for name in names)
    except (OSError, LookupError, TypeError, ValueError, RecursionError):
        return ()
    return chunks if all(len(chunk) == _DIGEST_BYTES for chunk in chunks) else ()
