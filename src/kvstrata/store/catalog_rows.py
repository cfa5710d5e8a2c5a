"""Single rows of the catalog: how a header becomes one, and what a transaction asks of one chunk.

Every function here runs inside a transaction of `Database`.
"""

from __future__ import annotations

import sqlite3
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvstrata.contract.encoding import digest
from kvstrata.contract.identity import ChunkContext, Namespace
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.states import DURABLE_CHUNK, DurableChunkState
from kvstrata.store.catalog_database import CatalogDamaged
from kvstrata.tiers.chunk_format import Header

__all__ = [
    "ChunkRow",
    "drop_row",
    "find_row",
    "insert_rows",
    "layout_digest",
    "namespace_digest",
    "next_generation",
    "packed_tokens",
    "tenant_digest",
]

_REMOVALS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """What deleting and publishing need to know of a row. zero: its file is overwritten before it goes."""

    id: int
    chunk: bytes
    state: DurableChunkState
    layout: bytes
    file_bytes: int
    generation: int
    zero: bool
    tenant: bytes


def packed_tokens(token_ids: tuple[int, ...]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", token_ids)
    if struct.pack("=I", 1) != struct.pack("<I", 1):
        packed.byteswap()
    return packed.tobytes()


@lru_cache(maxsize=256)
def layout_digest(layout: SegmentLayout) -> bytes:
    """32-byte digest of a layout."""
    return digest("segment-layout/1", layout)


@lru_cache(maxsize=4096)
def namespace_digest(namespace: Namespace) -> bytes:
    """32-byte digest of tenant and salt; the salt itself never reaches the catalog."""
    return digest("namespace/1", namespace)


@lru_cache(maxsize=4096)
def tenant_digest(tenant: str) -> bytes:
    """32-byte digest of a tenant's name."""
    return digest("tenant/1", tenant)


def find_row(database: sqlite3.Connection, chunk: bytes) -> ChunkRow | None:
    """The row of `chunk`. Errors: `CatalogDamaged` for values that no row can have."""
    found = database.execute(
        "SELECT c.id, c.state, c.layout, c.file_bytes, c.replica_generation, c.zero, x.tenant"
        " FROM chunks c LEFT JOIN contexts x ON x.id = c.context WHERE c.digest = ?",
        (chunk,),
    ).fetchone()
    if found is None:
        return None
    row, state, layout, size, generation, zero, tenant = found
    try:
        known = DurableChunkState(state)
    except ValueError as error:
        raise CatalogDamaged(f"chunk {chunk.hex()} has the state {state!r}") from error
    numbers = all(isinstance(value, int) for value in (size, generation, zero))
    if not numbers or not isinstance(layout, bytes) or not isinstance(tenant, bytes):
        raise CatalogDamaged(f"the row of chunk {chunk.hex()} holds values of another type")
    return ChunkRow(row, chunk, known, layout, size, generation, bool(zero), tenant)


def insert_rows(database: sqlite3.Connection, headers: Sequence[Header], now: float) -> None:
    """Make the rows of chunks that have none, published, each with the next replica generation."""
    if not headers:
        return
    first = next_generation(database, len(headers)) - len(headers) + 1
    contexts = {header.identity.context.digest: header.identity.context for header in headers}
    known = {name: _context_row(database, context) for name, context in contexts.items()}
    state = str(DURABLE_CHUNK.require(DurableChunkState.RESERVED, DurableChunkState.PUBLISHED))
    database.executemany(
        "INSERT INTO chunks(digest, context, parent, start, tokens, layout, payload, file_bytes, replica_generation,"
        " state, created, last_used) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                header.identity.digest,
                known[header.identity.context.digest],
                header.identity.parent,
                header.identity.start,
                packed_tokens(header.identity.token_ids),
                layout_digest(header.layout),
                header.payload_digest,
                header.file_bytes,
                generation,
                state,
                now,
                now,
            )
            for generation, header in enumerate(headers, first)
        ],
    )


def _context_row(database: sqlite3.Connection, context: ChunkContext) -> int:
    known = (context.digest, namespace_digest(context.namespace), tenant_digest(context.namespace.tenant))
    found = database.execute("SELECT id FROM contexts WHERE digest = ?", known[:1]).fetchone()
    if found is None:
        found = database.execute(
            "INSERT INTO contexts(digest, namespace, tenant) VALUES (?, ?, ?) RETURNING id", known
        ).fetchone()
    return int(found[0])


def drop_row(database: sqlite3.Connection, row: ChunkRow) -> None:
    """Take a row out and note the removal for other processes."""
    database.execute("DELETE FROM chunks WHERE id = ?", (row.id,))
    database.execute("INSERT INTO removed(digest) VALUES (?)", (row.chunk,))
    database.execute("DELETE FROM removed WHERE id <= last_insert_rowid() - ?", (_REMOVALS_KEPT,))
    next_generation(database)


def next_generation(database: sqlite3.Connection, count: int = 1) -> int:
    """Advance the directory's generation by `count` and return it."""
    return int(
        database.execute(
            "UPDATE meta SET directory_generation = directory_generation + ? RETURNING directory_generation", (count,)
        ).fetchone()[0]
    )
