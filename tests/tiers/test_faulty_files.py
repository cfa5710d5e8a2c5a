"""Faults below the checksums are found above them: a whole chunk, a refusal with its reason, never other bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from chunks_and_faults import make_chunk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.errors import Reason, StoreError
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan, Injection, Killed
from kvstrata.tiers.faulty_files import FaultyFiles
from kvstrata.tiers.files import FileTier, OsFiles, WriteOutcome

CHUNK = make_chunk(1)


def faulty(root: Path, *wishes: tuple[str, int, Fault], **options: object) -> FileTier:
    plan = FaultPlan(explicit=tuple(Injection(*wish) for wish in wishes), **options)  # type: ignore[arg-type]
    return FileTier(root, files=FaultyFiles(OsFiles(), FaultInjector(plan)), durable=True)


def assert_right(tier: FileTier) -> None:
    with tier.open(CHUNK.digest) as file:
        for layer in range(file.layers):
            target = bytearray(file.segment_bytes)
            file.read_into(layer, [memoryview(target)])
            assert bytes(target) == CHUNK.payload(layer)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (("pwritev", 0, Fault.CORRUPT), Reason.STORE_IO),
        (("pwritev", 0, Fault.LOSE), Reason.STORE_IO),
        (("pwritev", 0, Fault.FILL_UP), Reason.STORE_FULL),
        (("allocate", 0, Fault.FILL_UP), Reason.STORE_FULL),
        (("open", 0, Fault.FILL_UP), Reason.STORE_FULL),
        (("makedirs", 0, Fault.FILL_UP), Reason.STORE_FULL),
        (("link", 0, Fault.FILL_UP), Reason.STORE_FULL),
        (("preadv", 3, Fault.CORRUPT), Reason.STORE_IO),
        (("preadv", 3, Fault.LOSE), Reason.STORE_IO),
    ],
)
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, wish: tuple[str, int, Fault], reason: Reason) -> None:
    with pytest.raises(StoreError) as refusal:
        faulty(tmp_path, wish).write(*CHUNK.arguments)
    assert refusal.value.reason is reason
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "wish",
    [
        ("pwritev", 0, Fault.SHORTEN),
        ("pwritev", 0, Fault.DUPLICATE),
        ("pwritev", 0, Fault.REORDER),
        ("preadv", 3, Fault.DUPLICATE),
        ("fdatasync", 0, Fault.DUPLICATE),
        ("sync_directory", 0, Fault.LOSE),
        ("open", 0, Fault.DELAY),
    ],
)
def test_what_a_system_may_do_is_withstood(tmp_path: Path, wish: tuple[str, int, Fault]) -> None:
    tier = faulty(tmp_path, wish, delay_s=0.0)
    assert tier.write(*CHUNK.arguments).outcome is WriteOutcome.WRITTEN
    assert tier._files.injector.log == [Injection(*wish)]  # type: ignore[attr-defined]
    assert_right(FileTier(tmp_path))


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (("open", 0, Fault.LOSE), Reason.CHUNK_MISSING),
        (("preadv", 0, Fault.LOSE), Reason.STORE_IO),
        (("preadv", 0, Fault.SHORTEN), Reason.CHUNK_TRUNCATED),
        (("preadv", 1, Fault.CORRUPT), Reason.CHUNK_DAMAGED),
        (("preadv", 2, Fault.SHORTEN), Reason.CHUNK_TRUNCATED),
        (("preadv", 2, Fault.CORRUPT), Reason.CHUNK_DAMAGED),
        (("preadv", 2, Fault.LOSE), Reason.STORE_IO),
    ],
)
def test_a_read_that_fails_says_why(tmp_path: Path, wish: tuple[str, int, Fault], reason: Reason) -> None:
    FileTier(tmp_path).write(*CHUNK.arguments)
    tier = faulty(tmp_path, wish)
    with pytest.raises(StoreError) as refusal:
        assert_right(tier)
    assert refusal.value.reason is reason
    assert_right(tier)  # once, and not for good


@pytest.mark.parametrize("operation", ["open", "allocate", "pwritev", "fdatasync", "close", "link", "unlink"])
def test_a_death_leaves_the_whole_chunk_or_nothing(tmp_path: Path, operation: str) -> None:
    tier = faulty(tmp_path, (operation, 0, Fault.DIE))
    with pytest.raises(Killed):
        tier.write(*CHUNK.arguments)
    after = FileTier(tmp_path)
    assert after.has(CHUNK.digest) is (operation == "unlink")
    after.write(*CHUNK.arguments)
    assert_right(after)


def test_two_corruptions_do_not_make_one_right(tmp_path: Path) -> None:
    """The write of a chunk and the read that validates it."""
    with pytest.raises(StoreError) as refusal:
        faulty(tmp_path, ("pwritev", 0, Fault.CORRUPT), ("preadv", 2, Fault.CORRUPT)).write(*CHUNK.arguments)
    assert refusal.value.reason is Reason.STORE_IO


def test_a_publication_that_was_lost(tmp_path: Path) -> None:
    tier = faulty(tmp_path, ("link", 0, Fault.LOSE))
    tier.write(*CHUNK.arguments)
    with pytest.raises(StoreError) as refusal:
        assert_right(tier)
    assert refusal.value.reason is Reason.CHUNK_MISSING


@given(st.integers(0, 2**32))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_fails_no_other_bytes_come_out(tmp_path: Path, seed: int) -> None:
    rates = {fault: 0.03 for fault in Fault if fault not in (Fault.HANG, Fault.DELAY)}
    injector = FaultInjector(FaultPlan(seed, rates))
    root = tmp_path / str(seed)
    tier = FileTier(root, files=FaultyFiles(OsFiles(), injector))
    for _ in range(6):
        try:
            tier.write(*CHUNK.arguments)
            assert_right(tier)
        except StoreError:
            continue
        except Killed:
            injector.revive()
    injector.enabled = False
    FileTier(root).write(*CHUNK.arguments)
    assert_right(FileTier(root))
