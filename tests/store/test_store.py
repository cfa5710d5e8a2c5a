"""A store opens only what is its own, and deletes only what nobody needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chunks_and_faults import FaultyFiles, flip, make_chunk, tree, write_all

from kvstrata.errors import Reason, StateError, StoreError
from kvstrata.store import CollectOutcome, Store
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan
from kvstrata.tiers.faulty import FaultyTier
from kvstrata.tiers.throttled import Link, ThrottledTier

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def child(code: str) -> subprocess.Popen[str]:
    """A Python process that has printed its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return process


def test_a_missing_directory_is_created_and_opens_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store"
    chunk = make_chunk()
    with Store(path) as store:
        assert not store.read_only
        store.tier.write(*chunk.arguments)
    with Store(str(path), create=False) as store:
        assert store.tier.has(chunk.digest)
    assert json.loads((path / "store.json").read_text())["format"] == 2


@pytest.mark.parametrize("options", [{"create": False}, {"read_only": True}])
def test_a_missing_store_that_must_not_be_created(tmp_path: Path, options: dict[str, bool]) -> None:
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path / "none", **options)
    assert refusal.value.reason is Reason.STORE_MISSING
    assert not (tmp_path / "none").exists()


def test_an_empty_directory_becomes_a_store_only_where_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path, create=False)
    assert refusal.value.reason is Reason.STORE_MISSING
    (tmp_path / ".store.json.1").write_text("a creation that was killed")
    (tmp_path / "lost+found").mkdir()
    with Store(tmp_path) as store:
        assert store.usage().chunks == 0


@pytest.mark.parametrize("below", [False, True])
def test_a_file_is_not_a_store(tmp_path: Path, below: bool) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(StoreError) as refusal:
        Store(file / "store" if below else file)
    assert refusal.value.reason is Reason.STORE_NOT_A_DIRECTORY
    assert file.read_text() == "mine"


def test_a_link_to_nowhere_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path / "link")
    assert refusal.value.reason in {Reason.STORE_NOT_A_DIRECTORY, Reason.STORE_MISSING}


@pytest.mark.parametrize("path", ["/proc/kvstrata/store", "/proc/self/store", "{tmp}/" + "x" * 300])
def test_where_no_directory_can_be_made_the_disk_is_not_blamed(tmp_path: Path, path: str) -> None:
    with pytest.raises(StoreError, match="no place") as refusal:
        Store(path.replace("{tmp}", str(tmp_path)))
    assert refusal.value.reason is Reason.STORE_MISSING
    assert path[:5].replace("{tmp}", str(tmp_path)[:5]) in refusal.value.cause
    assert "/proc" in refusal.value.next_step


@pytest.mark.parametrize("name", ["photo.jpg", ".hidden", "chunks"])
def test_a_strangers_directory_is_never_written_to(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path)
    assert refusal.value.reason is Reason.STORE_FOREIGN
    assert tree(tmp_path) == {name: b"mine"}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "other", "format": 1}', '{"kind": "kvstrata-store"}'])
def test_a_marker_of_something_else_is_foreign(tmp_path: Path, content: str) -> None:
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path)
    assert refusal.value.reason is Reason.STORE_FOREIGN
    assert tree(tmp_path) == {"store.json": content.encode()}


def test_a_newer_store_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    marker = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps(marker | {"format": 3}))
    before = tree(tmp_path)
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path)
    assert refusal.value.reason is Reason.STORE_FORMAT_NEWER
    assert tree(tmp_path) == before


class DeniedFiles(FaultyFiles):
    """A directory that may be read and not written to, whoever asks."""

    def __init__(self) -> None:
        super().__init__()

    def open(self, path: Path, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(13, "Permission denied")
        return int(self.__getattr__("open")(path, flags))


def test_a_store_that_may_not_be_written_to_opens_for_reading(tmp_path: Path) -> None:
    chunk = make_chunk()
    with Store(tmp_path) as store:
        store.tier.write(*chunk.arguments)
    before = tree(tmp_path)
    with Store(tmp_path, files=DeniedFiles()) as store:
        assert store.read_only
        assert [verdict.sound for verdict in store.verify()] == [True]
        assert store.collect(()).outcome is CollectOutcome.READ_ONLY
        with pytest.raises(StoreError) as refusal:
            store.tier.write(*make_chunk(1).arguments)
        assert refusal.value.reason is Reason.STORE_READ_ONLY
        with pytest.raises(StoreError) as refusal:
            store.require_writable()
        assert refusal.value.reason is Reason.STORE_READ_ONLY
    assert tree(tmp_path) == before


def test_insisting_on_writing_is_refused_at_once(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path, read_only=False, files=DeniedFiles())
    assert refusal.value.reason is Reason.STORE_READ_ONLY


def test_a_full_disk_does_not_hide_what_is_stored(tmp_path: Path) -> None:
    chunk = make_chunk()
    with Store(tmp_path) as store:
        store.tier.write(*chunk.arguments)
    with Store(tmp_path, files=FaultyFiles(named={"pwritev": 28, "allocate": 28})) as store:
        assert not store.read_only
        with pytest.raises(StoreError) as refusal:
            store.tier.write(*make_chunk(1).arguments)
        assert refusal.value.reason is Reason.STORE_FULL
        assert [verdict.sound for verdict in store.verify()] == [True]


@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "link"])
def test_a_store_that_cannot_be_created_leaves_an_empty_directory(tmp_path: Path, call: str) -> None:
    with pytest.raises(StoreError) as refusal:
        Store(tmp_path / "store", files=FaultyFiles(named={call: 28}))
    assert refusal.value.reason is Reason.STORE_FULL
    assert tree(tmp_path) == {}
    Store(tmp_path / "store").close()


def test_a_closed_store_refuses(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    store.close()
    for call in (store.usage, store.verify, lambda: store.collect(()), store.require_writable):
        with pytest.raises(StateError) as refusal:
            call()
        assert refusal.value.reason is Reason.CLOSED


def test_usage_counts_everything(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        chunks = [make_chunk(seed) for seed in range(3)]
        write_all(store.tier, chunks)
        store.tier.revoke(chunks[0].digest)
        (tmp_path / "tmp" / "left").write_bytes(b"12345")
        usage = store.usage()
    size = usage.chunk_bytes // 2
    assert (usage.chunks, usage.damaged, usage.damaged_bytes) == (2, 1, size)
    assert (usage.temporary, usage.temporary_bytes, usage.sessions, usage.snapshots) == (1, 5, 0, 0)
    assert usage.metadata_bytes == (tmp_path / "store.json").stat().st_size
    assert usage.total_bytes == sum(len(content) for content in tree(tmp_path).values())


def test_verification_names_each_damage_and_changes_nothing(tmp_path: Path) -> None:
    chunks = [make_chunk(seed) for seed in range(4)]
    with Store(tmp_path) as store:
        write_all(store.tier, chunks)
        flip(store.tier.path(chunks[0].digest), 9000)
        os.truncate(store.tier.path(chunks[1].digest), 5000)
        store.tier.path(chunks[2].digest).write_bytes(store.tier.path(chunks[3].digest).read_bytes())
        before = tree(tmp_path)
        steps: list[tuple[int, int]] = []
        found = {item.chunk: item.reason for item in store.verify(lambda done, total: steps.append((done, total)))}
    assert found == {
        chunks[0].digest: Reason.CHUNK_DAMAGED,
        chunks[1].digest: Reason.CHUNK_TRUNCATED,
        chunks[2].digest: Reason.CHUNK_FOREIGN,
        chunks[3].digest: None,
    }
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert tree(tmp_path) == before


def test_collection_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    chunks = [make_chunk(seed) for seed in range(4)]
    with Store(tmp_path) as store:
        write_all(store.tier, chunks)
        size = store.usage().chunk_bytes // 4
        (tmp_path / "tmp" / "left").write_bytes(b"12345")
        result = store.collect({chunks[1].digest, chunks[2].digest})
        assert (result.outcome, result.chunks_removed, result.temporaries_removed) == (CollectOutcome.DONE, 2, 1)
        assert result.bytes_freed == 2 * size + 5
        assert set(store.tier.list()) == {chunks[1].digest, chunks[2].digest}


@pytest.mark.parametrize("read_only", [True, None])
def test_nothing_is_deleted_while_somebody_else_has_the_store_open(tmp_path: Path, read_only: bool | None) -> None:
    chunk = make_chunk()
    with Store(tmp_path) as store:
        store.tier.write(*chunk.arguments)
        with Store(tmp_path, read_only=read_only):
            result = store.collect(())
            assert (result.outcome, result.reason) == (CollectOutcome.BUSY, Reason.STORE_BUSY)
            assert result.chunks_removed == 0
            assert store.tier.has(chunk.digest)
        assert store.collect(()).outcome is CollectOutcome.DONE


def test_a_busy_store_says_which_process_uses_it(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        process = child(
            f"from kvstrata.store import Store; s = Store({str(tmp_path)!r}); print('ready', flush=True); input()"
        )
        result = store.collect(())
        process.communicate("\n", timeout=60)
        assert result.outcome is CollectOutcome.BUSY
        assert str(process.pid) in result.detail
        assert store.collect(()).outcome is CollectOutcome.DONE


def test_the_shared_lock_is_held_again_after_a_refused_and_after_a_done_collection(tmp_path: Path) -> None:
    with Store(tmp_path) as first:
        with Store(tmp_path) as second:
            first.collect(())
            assert second.collect(()).outcome is CollectOutcome.BUSY
        assert first.collect(()).outcome is CollectOutcome.DONE
        with Store(tmp_path) as second:
            assert second.collect(()).outcome is CollectOutcome.BUSY


def test_what_the_question_raises_stops_the_collection(tmp_path: Path) -> None:
    chunk = make_chunk()

    def unknown() -> set[bytes]:
        raise LookupError("cannot tell")

    with Store(tmp_path) as store:
        store.tier.write(*chunk.arguments)
        with pytest.raises(LookupError):
            store.collect(unknown)
        assert store.tier.has(chunk.digest)
        assert store.collect({chunk.digest}).outcome is CollectOutcome.DONE


def test_opening_waits_for_a_collector_but_not_for_ever(tmp_path: Path) -> None:
    with Store(tmp_path) as store:

        def open_meanwhile() -> set[bytes]:
            with pytest.raises(StoreError) as refusal:
                Store(tmp_path, wait_s=0.1)
            assert refusal.value.reason is Reason.STORE_BUSY
            return set()

        assert store.collect(open_meanwhile).outcome is CollectOutcome.DONE


def test_temporaries_of_the_dead_go_when_the_store_is_opened_alone(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        (tmp_path / "tmp" / "left").write_bytes(b"half")
        with Store(tmp_path) as other:
            assert other.usage().temporary == 1
        assert store.usage().temporary == 1
    with Store(tmp_path) as store:
        assert store.usage().temporary == 0


WRITER = """
from chunks_and_faults import make_chunk
from kvstrata.store import Store
store = Store({path!r})
chunks = [make_chunk(seed) for seed in range(400)]
for number, chunk in enumerate(chunks):
    store.tier.write(*chunk.arguments)
    if number == 0:
        print("ready", flush=True)
print("done", flush=True)
input()
"""


def test_a_writer_killed_in_the_middle_leaves_whole_chunks(tmp_path: Path) -> None:
    for _ in range(3):
        process = child(WRITER.format(path=str(tmp_path)))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        with Store(tmp_path) as store:
            verdicts = list(store.verify())
            assert len(verdicts) >= 1
            assert all(verdict.sound for verdict in verdicts)
            assert store.usage().temporary == 0


def test_two_processes_write_the_same_chunks(tmp_path: Path) -> None:
    code = WRITER.format(path=str(tmp_path)).replace("range(400)", "range(20)")
    processes = [child(code), child(code)]
    for process in processes:
        process.communicate("\n", timeout=120)
        assert process.returncode == 0
    with Store(tmp_path) as store:
        assert [verdict.sound for verdict in store.verify()] == [True] * 20
        assert store.usage().temporary == 0
        assert store.usage().damaged == 0


def test_a_wrapped_tier_stands_between_the_files_and_their_users(tmp_path: Path) -> None:
    """A faulty tier behind a slow link; what verifies and collects looks at the files themselves."""
    chunk, link = make_chunk(), Link(1e9, 0.01, sleep=lambda _: None)
    injector = FaultInjector(FaultPlan(rates={Fault.LOSE: 1.0}, operations=frozenset({"has"})))
    with Store(tmp_path, wrap_tier=lambda tier: ThrottledTier(FaultyTier(tier, injector), link)) as store:
        store.tier.write(*chunk.arguments)
        assert (store.tier.has(chunk.digest), store.file_tier.has(chunk.digest)) == (False, True)
        with store.tier.open(chunk.digest) as reader, store.file_tier.open(chunk.digest) as file:
            assert reader.stored_bytes == file.stored_bytes == store.usage().chunk_bytes
            assert [reader.checksum(layer) for layer in range(3)] == [file.checksum(layer) for layer in range(3)]
        assert store.tier.capability.tier == "link"
        assert [verdict.sound for verdict in store.verify()] == [True]
        assert store.collect(keep=()).chunks_removed == 1
    with Store(tmp_path) as store:
        assert store.tier is store.file_tier
