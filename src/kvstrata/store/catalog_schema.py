"""Tables of `catalog.sqlite`, the directory of a durable tier. The chunk files stay the truth about their rows.

A chunk that is being written is an intent, one that is published or being deleted is a row of `chunks`, and one that is
gone has neither. `space` is kept by triggers, so that no code path can forget to count.
"""

from __future__ import annotations

__all__ = ["APPLICATION_ID", "SCHEMA", "SCHEMA_VERSION", "SPACE_USED"]

APPLICATION_ID = 1263948611
SCHEMA_VERSION = 1

SPACE_USED = "SELECT chunk_bytes + manifest_bytes + damaged_bytes + other_bytes + reserved_bytes FROM space"

SCHEMA = """
CREATE TABLE meta(
    store TEXT NOT NULL,
    directory_generation INTEGER NOT NULL,
    authority_epoch INTEGER NOT NULL
);
CREATE TABLE space(
    chunks INTEGER NOT NULL DEFAULT 0,
    chunk_bytes INTEGER NOT NULL DEFAULT 0,
    reserved_bytes INTEGER NOT NULL DEFAULT 0,
    manifest_bytes INTEGER NOT NULL DEFAULT 0,
    damaged_bytes INTEGER NOT NULL DEFAULT 0,
    other_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE contexts(
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    namespace BLOB NOT NULL,
    tenant BLOB NOT NULL
);
CREATE TABLE chunks(
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    context INTEGER NOT NULL REFERENCES contexts(id),
    parent BLOB NOT NULL,
    start INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    layout BLOB NOT NULL,
    payload BLOB NOT NULL,
    file_bytes INTEGER NOT NULL,
    replica_generation INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('published', 'deleting')),
    zero INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    last_used REAL NOT NULL,
    uses INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX chunks_by_use ON chunks(state, last_used);
CREATE TABLE owners(
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    process TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started REAL NOT NULL,
    epoch INTEGER NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE intents(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    process TEXT NOT NULL,
    chunk BLOB,
    session INTEGER REFERENCES owners(id),
    temporary TEXT NOT NULL UNIQUE,
    bytes INTEGER NOT NULL
);
CREATE TABLE pins(
    chunk BLOB NOT NULL,
    owner INTEGER NOT NULL REFERENCES owners(id),
    expires REAL,
    PRIMARY KEY (chunk, owner)
) WITHOUT ROWID;
CREATE INDEX pins_by_owner ON pins(owner);
CREATE TABLE removed(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL
);
CREATE TRIGGER chunk_added AFTER INSERT ON chunks BEGIN
    UPDATE space SET chunks = chunks + 1, chunk_bytes = chunk_bytes + new.file_bytes;
END;
CREATE TRIGGER chunk_changed AFTER UPDATE OF file_bytes ON chunks BEGIN
    UPDATE space SET chunk_bytes = chunk_bytes + new.file_bytes - old.file_bytes;
END;
CREATE TRIGGER chunk_removed AFTER DELETE ON chunks BEGIN
    UPDATE space SET chunks = chunks - 1, chunk_bytes = chunk_bytes - old.file_bytes;
END;
CREATE TRIGGER intent_added AFTER INSERT ON intents BEGIN
    UPDATE space SET reserved_bytes = reserved_bytes + new.bytes;
END;
CREATE TRIGGER intent_removed AFTER DELETE ON intents BEGIN
    UPDATE space SET reserved_bytes = reserved_bytes - old.bytes;
END;
CREATE TRIGGER manifest_changed AFTER UPDATE OF bytes ON owners BEGIN
    UPDATE space SET manifest_bytes = manifest_bytes + new.bytes - old.bytes;
END;
CREATE TRIGGER owner_removed AFTER DELETE ON owners BEGIN
    UPDATE space SET manifest_bytes = manifest_bytes - old.bytes;
END;
INSERT INTO space DEFAULT VALUES;
PRAGMA application_id = 1263948611;
PRAGMA user_version = 1;
"""
"""`process`: whose an owner or an intent is; a session belongs to the process that saved it."""
