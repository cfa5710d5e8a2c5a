"""Tables of `catalog.sqlite`, the directory of a durable tier. The chunk files stay the truth about their rows.

A chunk that is being written is an intent, one that is published or being deleted is a row of `chunks`, and one that is
gone has neither. `space` is kept by triggers, so that no code path can forget to count. Every column checks its type:
SQLite would keep any value in any column, and a damaged page is then found by its check.
"""

from __future__ import annotations

__all__ = ["APPLICATION_ID", "SCHEMA", "SCHEMA_VERSION", "SPACE_USED"]

APPLICATION_ID = 1263948611
SCHEMA_VERSION = 1

SPACE_USED = (
    "SELECT chunk_bytes + manifest_bytes + damaged_bytes + stray_bytes + other_bytes + reserved_bytes FROM space"
)

SCHEMA = """
CREATE TABLE meta(
    store TEXT NOT NULL CHECK (typeof(store) = 'text'),
    directory_generation INTEGER NOT NULL CHECK (typeof(directory_generation) = 'integer'),
    authority_epoch INTEGER NOT NULL CHECK (typeof(authority_epoch) = 'integer')
);
CREATE TABLE space(
    chunks INTEGER NOT NULL DEFAULT 0 CHECK (typeof(chunks) = 'integer'),
    chunk_bytes INTEGER NOT NULL DEFAULT 0 CHECK (typeof(chunk_bytes) = 'integer'),
    reserved_bytes INTEGER NOT NULL DEFAULT 0 CHECK (typeof(reserved_bytes) = 'integer'),
    manifest_bytes INTEGER NOT NULL DEFAULT 0 CHECK (typeof(manifest_bytes) = 'integer'),
    damaged_bytes INTEGER NOT NULL DEFAULT 0 CHECK (typeof(damaged_bytes) = 'integer'),
    stray_bytes INTEGER NOT NULL DEFAULT 0 CHECK (typeof(stray_bytes) = 'integer'),
    other_bytes INTEGER NOT NULL DEFAULT 0 CHECK (typeof(other_bytes) = 'integer')
);
CREATE TABLE contexts(
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE CHECK (typeof(digest) = 'blob'),
    namespace BLOB NOT NULL CHECK (typeof(namespace) = 'blob'),
    tenant BLOB NOT NULL CHECK (typeof(tenant) = 'blob')
);
CREATE TABLE chunks(
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE CHECK (typeof(digest) = 'blob'),
    context INTEGER NOT NULL REFERENCES contexts(id) CHECK (typeof(context) = 'integer'),
    parent BLOB NOT NULL CHECK (typeof(parent) = 'blob'),
    start INTEGER NOT NULL CHECK (typeof(start) = 'integer'),
    tokens BLOB NOT NULL CHECK (typeof(tokens) = 'blob'),
    layout BLOB NOT NULL CHECK (typeof(layout) = 'blob'),
    payload BLOB NOT NULL CHECK (typeof(payload) = 'blob'),
    file_bytes INTEGER NOT NULL CHECK (typeof(file_bytes) = 'integer'),
    replica_generation INTEGER NOT NULL CHECK (typeof(replica_generation) = 'integer'),
    state TEXT NOT NULL CHECK (state IN ('published', 'deleting')),
    zero INTEGER NOT NULL DEFAULT 0 CHECK (typeof(zero) = 'integer'),
    created REAL NOT NULL CHECK (typeof(created) = 'real'),
    last_used REAL NOT NULL CHECK (typeof(last_used) = 'real'),
    uses INTEGER NOT NULL DEFAULT 0 CHECK (typeof(uses) = 'integer')
);
CREATE INDEX chunks_by_use ON chunks(state, last_used);
CREATE TABLE owners(
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE CHECK (typeof(name) = 'text'),
    process TEXT NOT NULL CHECK (typeof(process) = 'text'),
    pid INTEGER NOT NULL CHECK (typeof(pid) = 'integer'),
    started REAL NOT NULL CHECK (typeof(started) = 'real'),
    epoch INTEGER NOT NULL CHECK (typeof(epoch) = 'integer'),
    bytes INTEGER NOT NULL DEFAULT 0 CHECK (typeof(bytes) = 'integer')
);
CREATE TABLE intents(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    process TEXT NOT NULL CHECK (typeof(process) = 'text'),
    chunk BLOB,
    session INTEGER REFERENCES owners(id) CHECK (session IS NULL OR typeof(session) = 'integer'),
    temporary TEXT NOT NULL UNIQUE CHECK (typeof(temporary) = 'text'),
    bytes INTEGER NOT NULL CHECK (typeof(bytes) = 'integer')
);
CREATE TABLE pins(
    chunk BLOB NOT NULL CHECK (typeof(chunk) = 'blob'),
    owner INTEGER NOT NULL REFERENCES owners(id) CHECK (typeof(owner) = 'integer'),
    expires REAL,
    PRIMARY KEY (chunk, owner)
) WITHOUT ROWID;
CREATE INDEX pins_by_owner ON pins(owner);
CREATE TABLE removed(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL CHECK (typeof(digest) = 'blob')
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
