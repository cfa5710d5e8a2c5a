"""Verification names what does not agree around the chunks, and repair makes it agree."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from chunks_and_faults import make_chunk, make_context, make_history, tree, write_all

from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import FindingKind, Store

IDS = tuple(range(300))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        names = write_all(opened.tier, make_history(make_context(), IDS))
        SessionStore(opened).save("chat", make_context(), IDS, names, len(IDS))
        yield opened


def kinds(store: Store) -> list[FindingKind]:
    return [finding.kind for finding in store.audit()]


def repaired(store: Store) -> bool:
    findings = store.audit()
    assert store.repair(findings) == len(findings) > 0
    assert store.catalog is not None
    assert store.catalog.figures().used_bytes == store.usage().total_bytes
    return store.audit() == []


def test_a_sound_store_has_no_findings_and_is_not_changed(store: Store) -> None:
    before = tree(store.path)
    assert store.audit() == []
    assert store.repair([]) == 0
    assert tree(store.path) == before


def test_a_file_without_a_row_is_set_aside(store: Store) -> None:
    chunk = make_chunk(5)
    store.tier.write(*chunk.arguments)
    raw = store.tier.path(chunk.digest).read_bytes()
    store.evict([chunk.digest])
    store.tier.path(chunk.digest).write_bytes(raw)
    (finding,) = store.audit()
    assert (finding.kind, finding.subject) == (FindingKind.ORPHAN_FILE, chunk.digest.hex())
    assert repaired(store)
    assert store.usage().damaged == 1
    assert not store.tier.has(chunk.digest)


def test_a_row_without_a_file_goes(store: Store) -> None:
    chunk = make_chunk(5)
    store.tier.write(*chunk.arguments)
    store.tier.path(chunk.digest).unlink()
    (finding,) = store.audit()
    assert (finding.kind, finding.subject) == (FindingKind.ROW_WITHOUT_FILE, chunk.digest.hex())
    assert repaired(store)
    assert store.catalog is not None
    assert store.catalog.figures().chunks == 3


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("UPDATE chunks SET layout = x'00' WHERE id = 1", FindingKind.ROW_DIFFERS),
        ("UPDATE chunks SET file_bytes = 1 WHERE id = 1", FindingKind.ROW_DIFFERS),
        ("UPDATE space SET chunk_bytes = chunk_bytes + 1", FindingKind.COUNT_DIFFERS),
        ("UPDATE space SET chunks = 0", FindingKind.COUNT_DIFFERS),
        ("DELETE FROM pins", FindingKind.SESSION_WITHOUT_PIN),
        ("DELETE FROM pins WHERE rowid IN (SELECT 1); DELETE FROM owners WHERE name LIKE 'session%'", None),
        (
            "INSERT INTO intents(process, temporary, bytes) VALUES ('process:0', 'left', 5)",
            FindingKind.STALE_INTENT,
        ),
        (
            "INSERT INTO owners(name, process, pid, started, epoch) VALUES ('process:0', 'process:0', 1, 1.0, 1)",
            FindingKind.DEAD_OWNER,
        ),
        (
            "INSERT INTO owners(name, process, pid, started, epoch)"
            " VALUES ('session:' || printf('%064d', 7) || '/1', '', 1, 1.0, 1)",
            FindingKind.PIN_WITHOUT_SESSION,
        ),
    ],
)
def test_a_catalog_that_disagrees_is_corrected(store: Store, statement: str, kind: FindingKind | None) -> None:
    with closing(sqlite3.connect(store.path / "catalog.sqlite", isolation_level=None)) as database:
        if kind is None:
            statement, kind = "DELETE FROM owners WHERE name LIKE 'session%'", FindingKind.SESSION_WITHOUT_PIN
            database.execute("DELETE FROM pins")
        database.execute(statement)
    assert kinds(store) == [kind]
    assert repaired(store)
    assert store.evict(SessionStore(store).load("chat").chunks).removed == ()


def test_a_removed_manifest_leaves_a_pin_that_repair_drops(store: Store) -> None:
    (manifest,) = store.path.glob("sessions/*/1.json")
    manifest.unlink()
    assert kinds(store) == [FindingKind.PIN_WITHOUT_SESSION]
    assert repaired(store)
    assert store.catalog is not None
    assert len(store.catalog.candidates()) == 3


WRITER = """
import sys
from pathlib import Path
from chunks_and_faults import make_chunk
from kvstrata.store import Store
from kvstrata.tiers.journal import Intent
store = Store(sys.argv[1])
store.catalog.journal.reserve([Intent(make_chunk(5).identity, "left", 12345)])
(store.path / "tmp" / "left").write_bytes(b"half")
print("ready", flush=True)
input()
"""


def test_a_writer_that_died_is_named_and_cleaned_up_behind(store: Store) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(store.path)]
    assert store.catalog is not None
    epoch = store.catalog.figures().epoch
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            assert store.audit() == []
            assert store.catalog.figures().reserved_bytes == 12345
        finally:
            writer.kill()
    assert set(kinds(store)) == {FindingKind.STALE_INTENT, FindingKind.DEAD_OWNER}
    assert repaired(store)
    assert store.catalog.figures().reserved_bytes == 0
    assert store.catalog.figures().epoch == epoch + 1
    assert tree(store.path / "tmp") == {}
