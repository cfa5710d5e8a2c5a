"""What a store holds, and the removal of what nothing refers to."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstrata.errors import Reason
from kvstrata.store.catalog import Catalog
from kvstrata.store.rebuild import chunk_files
from kvstrata.tiers.filesystem import FileSystem, storage_error

__all__ = ["CollectOutcome", "CollectResult", "StoreUsage", "measure", "remove_strays", "remove_temporaries"]


class CollectOutcome(StrEnum):
    """How a collection ended; only after DONE has anything been removed."""

    DONE = "done"
    BUSY = "busy"
    READ_ONLY = "read_only"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class CollectResult:
    """What a collection removed, in chunks, temporary files and bytes, or why it removed nothing."""

    outcome: CollectOutcome
    chunks_removed: int = 0
    temporaries_removed: int = 0
    bytes_freed: int = 0
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What lies in a store: counts, and bytes as file sizes. `metadata_bytes` covers manifests and the marker."""

    chunks: int
    chunk_bytes: int
    sessions: int
    snapshots: int
    metadata_bytes: int
    damaged: int
    damaged_bytes: int
    temporary: int
    temporary_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of everything together."""
        return self.chunk_bytes + self.metadata_bytes + self.damaged_bytes + self.temporary_bytes


def measure(root: Path) -> StoreUsage:
    """Count what lies below `root`; blocks; files that vanish meanwhile are not counted."""
    chunks = list(_sizes(root / "chunks", "*/*.kv"))
    snapshots = list(_sizes(root / "sessions", "*/*.json"))
    damaged = list(_sizes(root / "damaged", "*"))
    temporary = list(_sizes(root / "tmp", "*"))
    return StoreUsage(
        chunks=len(chunks),
        chunk_bytes=sum(size for _, size in chunks),
        sessions=len({path.parent for path, _ in snapshots}),
        snapshots=len(snapshots),
        metadata_bytes=sum(size for _, size in snapshots) + sum(size for _, size in _sizes(root, "store.json")),
        damaged=len(damaged),
        damaged_bytes=sum(size for _, size in damaged),
        temporary=len(temporary),
        temporary_bytes=sum(size for _, size in temporary),
    )


def remove_temporaries(root: Path, files: FileSystem) -> tuple[int, int]:
    """Remove all temporary files; returns their number and bytes. Only for a caller that holds the store alone."""
    return _remove([path for path, _ in _sizes(root / "tmp", "*")], files)


def remove_strays(root: Path, catalog: Catalog, keep: Collection[bytes], files: FileSystem) -> tuple[int, int]:
    """Remove chunk files outside `keep` that no row stands for; returns their number and bytes. Only for a caller that
    holds the store alone."""
    published = frozenset(catalog.journal.list())
    return _remove([path for chunk, path in chunk_files(root) if chunk not in published and chunk not in keep], files)


def _remove(paths: list[Path], files: FileSystem) -> tuple[int, int]:
    count = freed = 0
    for path in paths:
        try:
            size = path.stat().st_size
            files.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, f"removing {path}") from error
        count += 1
        freed += size
    return count, freed


def _sizes(folder: Path, pattern: str) -> Iterator[tuple[Path, int]]:
    for path in folder.glob(pattern):
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            continue
        if path.is_file():
            yield path, size
