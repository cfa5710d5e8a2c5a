"""A catalog that is missing, damaged or another store's is built anew from the files; format 1 has none at all."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from pathlib import Path

import pytest
from chunks_and_faults import flip, make_chunk, make_context, make_history, write_all
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import KvstrataError, Reason
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import Lookup, Store
from kvstrata.tiers.journal import Intent

IDS = tuple(range(300))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Store(tmp_path / "store") as store:
        names = write_all(store.tier, make_history(make_context(), IDS))
        SessionStore(store).save("chat", make_context(), IDS, names, len(IDS))
        store.tier.write(*make_chunk(7).arguments)
    return tmp_path / "store"


def assert_whole(path: Path, *, rebuilt: bool = True) -> None:
    with Store(path) as store:
        assert store.catalog is not None
        assert store.catalog.rebuilt is rebuilt
        assert len(list(store.tier.list())) == 4
        assert all(verdict.sound for verdict in store.verify())
        snapshot = SessionStore(store).load("chat")
        assert {item.reason for item in store.evict(snapshot.chunks).refused} == {Reason.CHUNK_PINNED}
        assert store.catalog.find(make_chunk(7).identity) is Lookup.HIT
        assert store.catalog.figures().used_bytes == store.usage().total_bytes
        assert store.audit() == []


def make_format_1(path: Path) -> None:
    for name in ("catalog.sqlite", "catalog.removals", "lock.catalog"):
        (path / name).unlink()
    shutil.rmtree(path / "owners")
    (path / "store.json").write_text('{"format": 1, "kind": "kvstrata-store"}\n')


def test_a_store_of_format_1_is_upgraded_when_it_is_opened(path: Path) -> None:
    make_format_1(path)
    steps: list[tuple[int, int]] = []
    with Store(path, read_only=True) as store:
        assert store.catalog is None
        assert len(list(store.tier.list())) == 4
        assert all(verdict.sound for verdict in store.verify())
    with Store(path, progress=lambda done, total: steps.append((done, total))) as store:
        assert store.catalog is not None
        assert store.catalog.rebuilt
    assert steps[-1] == (4, 4)
    assert json.loads((path / "store.json").read_text())["format"] == 2
    assert_whole(path, rebuilt=False)


def _missing(path: Path) -> None:
    (path / "catalog.sqlite").unlink()


def _empty(path: Path) -> None:
    (path / "catalog.sqlite").write_bytes(b"")


def _noise(path: Path) -> None:
    (path / "catalog.sqlite").write_bytes(random.Random(0).randbytes(20000))


def _cut(path: Path) -> None:
    raw = (path / "catalog.sqlite").read_bytes()
    (path / "catalog.sqlite").write_bytes(raw[: len(raw) // 2])


def _another_stores(path: Path) -> None:
    with Store(path.parent / "other"):
        pass
    shutil.copy(path.parent / "other" / "catalog.sqlite", path / "catalog.sqlite")


@pytest.mark.parametrize("damage", [_missing, _empty, _noise, _cut, _another_stores])
def test_whatever_happened_to_the_database_nothing_is_lost(path: Path, damage: object) -> None:
    with Store(path) as store:
        assert store.catalog is not None
        before = store.catalog.figures()
    damage(path)  # type: ignore[operator]
    with Store(path, read_only=True) as store:
        assert len(list(store.tier.list())) == 4
    assert_whole(path)
    with Store(path) as store:
        assert store.catalog is not None
        after = store.catalog.figures()
    assert after.generation > before.generation
    assert after.epoch > before.epoch


def test_damage_while_the_store_is_open_is_healed_and_seen_by_others(path: Path) -> None:
    chunk = make_chunk(8)
    with Store(path) as store, Store(path) as other:
        assert store.catalog is not None
        (path / "catalog.sqlite").rename(path / "catalog.gone")
        store.tier.write(*chunk.arguments)
        assert store.catalog.rebuilt
        assert other.tier.has(chunk.digest)
        other.tier.write(*make_chunk(9).arguments)
        assert store.tier.has(make_chunk(9).digest)
        assert store.evict([chunk.digest]).removed == (chunk.digest,)
        assert not other.tier.has(chunk.digest)


def test_files_with_a_damaged_header_are_set_aside_by_a_rebuild(path: Path) -> None:
    with Store(path) as store:
        flip(store.tier.path(make_chunk(7).digest), 60)
    _missing(path)
    with Store(path) as store:
        assert store.catalog is not None
        assert len(list(store.tier.list())) == 3
        assert store.usage().damaged == 1
        assert store.catalog.figures().used_bytes == store.usage().total_bytes


@settings(max_examples=60)
@given(data=st.data())
def test_no_bytes_of_a_database_crash_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bits and runs of the database's bytes are changed: rows may be lost, but only our errors are raised."""
    path = tmp_path_factory.mktemp("fuzz") / "store"
    chunk = make_chunk(1, tokens=1)
    with Store(path) as store:
        store.tier.write(*chunk.arguments)
    raw = bytearray((path / "catalog.sqlite").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=64))
        raw[start : start + len(patch)] = patch[: len(raw) - start]
    (path / "catalog.sqlite").write_bytes(raw)
    outside = {item.name for item in path.parent.iterdir()}
    try:
        with Store(path, read_only=True) as store:
            list(store.tier.list())
        with Store(path) as store:
            assert store.catalog is not None
            store.tier.has(chunk.digest)
            store.tier.write(*chunk.arguments)
            assert store.tier.has(chunk.digest)
            store.repair(store.audit())
            store.catalog.candidates()
            store.evict([chunk.digest])
    except KvstrataError:
        pass
    assert {item.name for item in path.parent.iterdir()} == outside


def _rows() -> list[str]:
    return [
        "UPDATE chunks SET tokens = ?",
        "UPDATE chunks SET file_bytes = ?",
        "UPDATE chunks SET replica_generation = ?",
        "UPDATE chunks SET layout = ?",
        "UPDATE chunks SET digest = ?",
        "UPDATE chunks SET context = ?",
        "UPDATE chunks SET last_used = ?",
        "UPDATE contexts SET digest = ?",
        "UPDATE contexts SET tenant = ?",
        "UPDATE owners SET name = ?",
        "UPDATE intents SET temporary = ?",
        "UPDATE pins SET chunk = ?",
        "UPDATE pins SET expires = ?",
        "UPDATE meta SET authority_epoch = ?",
        "UPDATE space SET chunk_bytes = ?",
    ]


VALUES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from(["../../escape", "/etc/passwd", "session:../../x/1", "process:" + "/" * 32, "", "..", "."]),
)


@settings(max_examples=120)
@given(statement=st.sampled_from(_rows()), value=VALUES)
def test_no_value_in_a_row_crashes_it_or_leads_outside(
    tmp_path_factory: pytest.TempPathFactory, statement: str, value: object
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "store"
    chunk = make_chunk(1, tokens=1)
    (path.parent / "escape").write_text("mine")
    with Store(path) as store:
        store.tier.write(*chunk.arguments)
        assert store.catalog is not None
        store.catalog.pin(f"session:{'0' * 64}/1", [chunk.digest], None)
        store.catalog.journal.reserve([Intent(chunk.identity, "left", 10)])
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        with contextlib.suppress(sqlite3.Error):
            database.execute(statement, (value,))
    with contextlib.suppress(KvstrataError), Store(path) as store:
        assert store.catalog is not None
        store.tier.has(chunk.digest)
        list(store.tier.list())
        store.catalog.find(chunk.identity)
        store.repair(store.audit())
        store.catalog.candidates()
        store.tier.write(*chunk.arguments)
        store.evict([chunk.digest])
    assert sorted(item.name for item in path.parent.iterdir()) == ["escape", "store"]
    assert (path.parent / "escape").read_text() == "mine"
