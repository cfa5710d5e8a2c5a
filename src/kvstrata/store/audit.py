"""Whether the catalog, the files and the manifests of a store agree, and making them agree.

Chunk files are read as `verification` does; this looks at everything around them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.store.catalog import Catalog
from kvstrata.store.catalog_database import CatalogDamaged
from kvstrata.store.catalog_rows import drop_row, find_row, insert_rows, layout_digest
from kvstrata.store.collection import measure
from kvstrata.store.manifests import manifest_path, named_chunks, session_manifests
from kvstrata.store.owners import is_alive
from kvstrata.store.rebuild import add_session, chunk_files
from kvstrata.store.recovery import count_aside
from kvstrata.tiers.files import ChunkFile, FileTier, chunk_path
from kvstrata.tiers.filesystem import FileSystem

__all__ = ["Finding", "FindingKind", "audit", "repair"]


_SETTLED = "SELECT chunk_bytes + manifest_bytes + damaged_bytes + other_bytes FROM space"


class FindingKind(StrEnum):
    """What can be wrong around the chunks of a store."""

    CATALOG_DAMAGED = "catalog_damaged"
    ORPHAN_FILE = "orphan_file"
    ROW_WITHOUT_FILE = "row_without_file"
    ROW_DIFFERS = "row_differs"
    STALE_INTENT = "stale_intent"
    DEAD_OWNER = "dead_owner"
    PIN_WITHOUT_SESSION = "pin_without_session"
    SESSION_WITHOUT_PIN = "session_without_pin"
    COUNT_DIFFERS = "count_differs"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not agree: `subject` is a chunk in hexadecimal, an owner, a path or the name of a count."""

    kind: FindingKind
    subject: str
    detail: str


def audit(catalog: Catalog, root: Path, files: FileSystem) -> list[Finding]:
    """Compare; changes nothing. Blocks: lists all chunk files and reads their headers, and all manifests.

    What other processes change meanwhile may show as a finding. Errors: `StoreError`.
    """
    try:
        catalog.database.check()
    except CatalogDamaged as damage:
        return [Finding(FindingKind.CATALOG_DAMAGED, catalog.database.path.name, str(damage))]
    found = [*_chunks(catalog, root, files), *_owners(catalog, root)]
    counted, walked = catalog.figures(), measure(root)
    # Temporary files grow and go while others write: neither side counts them here.
    settled = catalog.database.read(lambda database: int(database.execute(_SETTLED).fetchone()[0]))
    for name, ours, theirs in (
        ("chunks", counted.chunks, walked.chunks),
        ("bytes", settled, walked.total_bytes - walked.temporary_bytes),
    ):
        if ours != theirs and not found:
            found.append(Finding(FindingKind.COUNT_DIFFERS, name, f"the catalog counts {ours}, a walk {theirs}"))
    return found


def repair(catalog: Catalog, root: Path, files: FileSystem, findings: Iterable[Finding]) -> int:
    """Put right what `audit` found; returns how many. Blocks. Rows follow the files, pins the manifests.

    A file without a row is set aside, never brought back. Errors: `StoreError`.
    """
    pending = list(findings)
    if any(finding.kind is FindingKind.CATALOG_DAMAGED for finding in pending):
        catalog.rebuild()
        return len(pending)
    catalog.recover()
    aside = FileTier(root, files=files)
    with catalog.removals() as announce:

        def change(database: sqlite3.Connection) -> None:
            announce()
            for finding in pending:
                match finding.kind:
                    case FindingKind.ORPHAN_FILE:
                        chunk = bytes.fromhex(finding.subject)
                        if find_row(database, chunk) is None:
                            aside.revoke(chunk)
                    case FindingKind.ROW_WITHOUT_FILE | FindingKind.ROW_DIFFERS:
                        _row_from_file(database, bytes.fromhex(finding.subject), root, files)
                    case FindingKind.SESSION_WITHOUT_PIN:
                        _pin_again(database, finding.subject, root)
            count_aside(database, root)
            rows = {row[0] for row in database.execute("SELECT digest FROM chunks")}
            other = sum(path.stat().st_size for chunk, path in chunk_files(root) if chunk not in rows)
            database.execute(
                "UPDATE space SET (chunks, chunk_bytes) = (SELECT COUNT(*), COALESCE(SUM(file_bytes), 0) FROM chunks),"
                " reserved_bytes = (SELECT COALESCE(SUM(bytes), 0) FROM intents),"
                " manifest_bytes = (SELECT COALESCE(SUM(bytes), 0) FROM owners),"
                " other_bytes = ?",
                (other + (root / "store.json").stat().st_size,),
            )

        catalog.database.write(change)
    return len(pending)


def _chunks(catalog: Catalog, root: Path, files: FileSystem) -> Iterable[Finding]:
    present = dict(chunk_files(root))
    published = set(catalog.journal.list())
    deleting = catalog.database.read(
        lambda database: {row[0] for row in database.execute("SELECT digest FROM chunks WHERE state = 'deleting'")}
    )
    for chunk in sorted(present.keys() - published - deleting):
        if not _newer(files, present[chunk], chunk):
            yield Finding(FindingKind.ORPHAN_FILE, chunk.hex(), f"{present[chunk]} has no row and is never read")
    for chunk in sorted(published - present.keys()):
        yield Finding(FindingKind.ROW_WITHOUT_FILE, chunk.hex(), "the row says published, and there is no file")
    for chunk in sorted(published & present.keys()):
        row = catalog.database.read(lambda database, chunk=chunk: find_row(database, chunk))  # type: ignore[misc]
        try:
            with ChunkFile(files, present[chunk], chunk) as file:
                same = row is None or (
                    row.layout == layout_digest(file.layout) and row.file_bytes == file.header.file_bytes
                )
        except StoreError:
            continue  # reading every chunk says more
        if not same:
            yield Finding(FindingKind.ROW_DIFFERS, chunk.hex(), "layout or size of the file are not those of its row")


def _newer(files: FileSystem, path: Path, chunk: bytes) -> bool:
    """Whether a newer version of this program wrote the file, which is left as it is."""
    try:
        ChunkFile(files, path, chunk).close()
    except StoreError as error:
        return error.reason is Reason.CHUNK_FORMAT_NEWER
    return False


def _owners(catalog: Catalog, root: Path) -> Iterable[Finding]:
    def query(database: sqlite3.Connection) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
        return (
            database.execute("SELECT name, id FROM owners ORDER BY name").fetchall(),
            database.execute("SELECT process, temporary FROM intents ORDER BY id").fetchall(),
        )

    owners, intents = catalog.database.read(query)
    manifests = dict(session_manifests(root))
    for process, temporary in intents:
        if not is_alive(root, process):
            yield Finding(FindingKind.STALE_INTENT, temporary, f"{process} began to write it and is dead")
    for name, _ in owners:
        if not name.startswith("session:"):
            if not is_alive(root, name):
                yield Finding(FindingKind.DEAD_OWNER, name, "its leases are void")
        elif name not in manifests and manifest_path(root, name) is not None:
            yield Finding(FindingKind.PIN_WITHOUT_SESSION, name, "there is no such manifest")
    known = dict(owners)
    for name in sorted(manifests):
        wanted = set(named_chunks(manifests[name]))
        if not wanted and name in known:
            continue
        pinned = catalog.pins.pinned_by(name)
        missing = {chunk for chunk in wanted - pinned if catalog.journal.published(chunk)}
        if name not in known or missing:
            yield Finding(FindingKind.SESSION_WITHOUT_PIN, name, f"{len(missing)} of its chunks are not pinned")


def _row_from_file(database: sqlite3.Connection, chunk: bytes, root: Path, files: FileSystem) -> None:
    row = find_row(database, chunk)
    if row is None:
        return
    path = chunk_path(root, chunk)
    try:
        with ChunkFile(files, path, chunk) as file:
            drop_row(database, row)
            insert_rows(database, [file.header], path.stat().st_mtime)
    except DamagedError as error:
        if error.reason is Reason.CHUNK_MISSING:
            drop_row(database, row)


def _pin_again(database: sqlite3.Connection, owner: str, root: Path) -> None:
    path = manifest_path(root, owner)
    if path is None or not path.is_file():
        return
    found = database.execute("SELECT id FROM owners WHERE name = ?", (owner,)).fetchone()
    if found is not None:
        database.execute("DELETE FROM pins WHERE owner = ?", found)
        database.execute("DELETE FROM owners WHERE id = ?", found)
    add_session(database, owner, path)
