"""One record for a chunk, one replica for a layer, and never the last valid copy evicted."""

from __future__ import annotations

import random

import pytest
from chunks_and_faults import LAYERS, make_chunk
from directory_parts import make_directory, make_history
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.states import FileReplicaState, ResidencyState, SlotState
from kvstrata.errors import ConfigurationError, Reason, StateError, StoreError
from kvstrata.lab.soak.interrupts import interrupt
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.tiers.memory import Grant, HostBacking, MemoryArena


def fill(directory: Directory, record: ChunkRecord, layer: int) -> None:
    grant = directory.reserve(record, layer)
    assert grant is not None
    directory.publish(record, layer, grant)


def make_resident(directory: Directory, seed: int = 0) -> ChunkRecord:
    record = directory.acquire(make_chunk(seed).identity)
    for layer in range(LAYERS):
        fill(directory, record, layer)
    return record


def make_published(directory: Directory, seed: int = 0) -> ChunkRecord:
    record = make_resident(directory, seed)
    directory.mark(record, FileReplicaState.WRITING)
    directory.mark(record, FileReplicaState.PUBLISHED)
    return record


def test_users_share_a_record() -> None:
    directory = make_directory()
    first, second = (directory.acquire(make_chunk(0).identity) for _ in range(2))
    other = directory.acquire(make_chunk(1).identity)
    assert first is second
    assert (first.users, len(directory), set(directory)) == (2, 2, {first, other})


def test_the_last_user_takes_the_slots_along() -> None:
    directory = make_directory()
    record = make_resident(directory)
    directory.acquire(record.identity)
    directory.drop(record)
    assert directory.arena.used_slots == LAYERS
    directory.drop(record)
    assert (directory.arena.used_slots, len(directory)) == (0, 0)
    with pytest.raises(StateError) as refusal:
        directory.drop(record)
    assert refusal.value.reason is Reason.NOT_COMMITTED


def test_a_chunk_of_another_salt_is_another_record() -> None:
    from kvstrata.contract.identity import Namespace

    directory = make_directory()
    names = [directory.acquire(make_chunk(0, namespace=Namespace("a", salt)).identity) for salt in ("x", "y")]
    assert names[0] is not names[1]


def test_the_last_valid_replica_stays() -> None:
    directory = make_directory()
    record = make_resident(directory)
    for state in (FileReplicaState.WRITING, FileReplicaState.FAILED):
        with pytest.raises(StateError, match="last valid"):
            directory.evict(record, 0)
        directory.mark(record, state)
    with pytest.raises(StateError, match="last valid"):
        directory.evict(record, 0)
    assert record.resident == LAYERS


def test_a_published_chunk_leaves_memory_layer_by_layer() -> None:
    directory = make_directory()
    record = make_published(directory)
    directory.evict(record, 1)
    directory.evict(record, 1)
    assert (record.resident, directory.arena.used_slots) == (2, 2)
    directory.mark(record, FileReplicaState.REVOKED)
    with pytest.raises(StateError, match="last valid"):
        directory.evict(record, 0)
    fill(directory, record, 1)
    assert record.resident == LAYERS


def test_publishing_checks_owner_generation_and_place() -> None:
    directory = make_directory()
    record = make_resident(directory)
    spare = directory.arena.reserve((record.digest, 0))
    assert spare is not None
    with pytest.raises(StateError, match="already"):
        directory.publish(record, 0, spare)
    other = directory.acquire(make_chunk(1).identity)
    with pytest.raises(StateError, match="device_released -> device_visible"):
        directory.publish(other, 0, spare)
    own = directory.reserve(other, 0)
    assert own is not None
    with pytest.raises(StateError, match="promote_reserved -> promote_reserved"):
        directory.reserve(other, 0)
    with pytest.raises(StateError, match="does not belong"):
        directory.publish(other, 0, spare)
    with pytest.raises(StateError, match="record was dropped"):
        directory.publish(record.__class__(record.identity, LAYERS), 1, spare)
    directory.arena.release(spare)
    with pytest.raises(StateError, match="generation"):
        directory.publish(other, 0, spare)
    assert (other.resident, other.residency[0]) == (0, ResidencyState.DEVICE_STAGED)
    directory.abandon(other, 0, own)
    assert (directory.arena.used_slots, other.residency[0]) == (LAYERS, ResidencyState.DEVICE_RELEASED)


def test_a_late_arrival_for_a_record_that_was_dropped_is_refused() -> None:
    directory = make_directory()
    record = directory.acquire(make_chunk(0).identity)
    grant = directory.reserve(record, 0)
    assert grant is not None
    directory.drop(record)
    again = directory.acquire(make_chunk(0).identity)
    assert again.generation > record.generation
    with pytest.raises(StateError, match="record was dropped"):
        directory.publish(record, 0, grant)
    directory.abandon(record, 0, grant)
    assert directory.arena.used_slots == 0


def host_of(directory: Directory, slots: int = 2 * LAYERS) -> MemoryArena:
    directory.host = MemoryArena(directory.arena.slot_bytes, HostBacking(directory.arena.slot_bytes, slots))
    return directory.host


def fill_host(directory: Directory, record: ChunkRecord, layer: int) -> Grant:
    assert directory.host is not None
    grant = directory.host.reserve(record.key(layer))
    assert grant is not None
    directory.publish_host(record, layer, grant, b"checksum")
    return grant


def test_the_authority_moves_with_what_survives_and_every_move_is_an_epoch() -> None:
    directory = make_directory()
    host = host_of(directory)
    record = make_history(directory, 1).chunks[0]
    seen = [(record.authority, record.epoch)]
    assert seen == [("device", 2)]
    directory.mark(record, FileReplicaState.WRITING)
    directory.mark(record, FileReplicaState.PUBLISHED)
    assert (record.authority, record.epoch) == ("files", 3)
    assert [record.valid(replica) for replica in record.replicas] == [True, False, True]
    directory.mark(record, FileReplicaState.REVOKED)
    assert (record.authority, record.epoch, record.valid(record.durable)) == ("device", 4, False)
    with pytest.raises(StateError, match="last valid"):
        directory.evict(record, 0)
    for layer in range(LAYERS):
        fill_host(directory, record, layer)
        directory.evict(record, layer)
    assert (record.authority, record.resident, directory.arena.used_slots) == ("host", 0, 0)
    assert [directory.valid_copies(record, layer) for layer in range(LAYERS)] == [1] * LAYERS
    with pytest.raises(StateError, match="host replica is the last valid"):
        directory.evict_host(record, 1)
    assert host.used_slots == LAYERS
    directory.drop(record)
    assert (host.used_slots, directory.arena.used_slots, len(directory)) == (0, 0, 0)


def test_a_copy_of_an_older_epoch_is_never_chosen() -> None:
    directory = make_directory()
    host_of(directory)
    record = make_published(directory)
    fill_host(directory, record, 0)
    assert directory.choose(record, 0, ("host", "device")) is record.host
    record.host.epoch -= 1
    assert directory.choose(record, 0, ("host", "device")) is record.device
    assert directory.choose(record, 0, ("host",)) is None
    assert directory.valid_copies(record, 0) == 2
    directory.mark(record, FileReplicaState.REVOKED)
    assert not record.valid(record.host), "a new epoch does not bring a fenced copy back"


def test_more_survivors_can_be_asked_for() -> None:
    directory = make_directory()
    directory.survivors = 2
    host_of(directory)
    record = make_published(directory)
    with pytest.raises(StateError, match="last valid"):
        directory.evict(record, 0)
    fill_host(directory, record, 0)
    directory.evict(record, 0)
    assert directory.valid_copies(record, 0) == 2
    with pytest.raises(ConfigurationError, match="survivors=0"):
        Directory(directory.arena, LAYERS, survivors=0)


def test_replicas_take_the_directorys_generations_and_keep_the_chunks_identity() -> None:
    directory = make_directory()
    directory.generation = 15
    host_of(directory)
    record = directory.acquire(make_chunk(0).identity)
    for layer in range(LAYERS):
        fill_host(directory, record, layer)
    for layer in range(LAYERS):
        fill(directory, record, layer)
    assert (record.generation, record.host.generation, record.device.generation) == (16, 17, 18)
    identities = {replica.identity(record.digest).digest for replica in (record.host, record.device)}
    assert len(identities) == 2
    for layer in range(LAYERS):
        directory.evict(record, layer)
    fill(directory, record, 0)
    assert record.device.generation == 19, "a copy that comes to life anew is another copy"


@pytest.mark.parametrize("cut", ["reserved", "copying", "published"])
def test_reclaim_forgets_promotions_that_nobody_finishes(cut: str) -> None:
    directory = make_directory()
    record = make_published(directory)
    directory.evict(record, 0)
    grant = directory.reserve(record, 0)
    assert grant is not None
    if cut != "reserved":
        directory.advance(record, 0, ResidencyState.COPY_IN)
    if cut == "published":
        directory.arena.publish(grant, record.key(0))
        record.residency[0] = ResidencyState.DEVICE_VISIBLE
    directory.reclaim([grant])
    assert directory.arena.used_slots == LAYERS
    directory.reclaim([])
    assert (directory.arena.used_slots, record.residency[0]) == (LAYERS - 1, ResidencyState.DEVICE_RELEASED)
    fill(directory, record, 0)
    assert record.resident == LAYERS


def test_illegal_states_of_the_file_replica() -> None:
    directory = make_directory()
    record = make_resident(directory)
    with pytest.raises(StateError, match="legal transition"):
        directory.mark(record, FileReplicaState.REVOKED)
    failure = StoreError(Reason.STORE_FULL, "no room")
    directory.mark(record, FileReplicaState.WRITING)
    directory.mark(record, FileReplicaState.FAILED, failure)
    assert record.failure is failure
    directory.mark(record, FileReplicaState.WRITING)
    assert record.failure is None


def test_a_stored_chunk_is_a_hit_once_validated() -> None:
    directory = make_directory()
    identity = make_chunk(0).identity
    assert directory.acquire(identity).file is FileReplicaState.ABSENT
    assert directory.acquire(identity, on_file=True).file is FileReplicaState.PUBLISHED
    record = directory.acquire(identity)
    directory.mark(record, FileReplicaState.REVOKED)
    assert directory.acquire(identity).file is FileReplicaState.REVOKED
    assert directory.acquire(identity, on_file=True).file is FileReplicaState.PUBLISHED


def test_held_bytes_survive_eviction_and_the_last_user() -> None:
    directory = make_directory(slots=2 * LAYERS)
    record = make_published(directory)
    backing = directory.arena.backing
    held = directory.hold(record)
    for grant in held:
        backing.writable(grant.slot)[:4] = b"mine"
    directory.evict(record, 0)
    directory.drop(record)
    other = make_resident(directory, seed=1)
    for grant in other.grants:
        assert grant is not None
        backing.writable(grant.slot)[:4] = b"next"
    assert directory.arena.free_slots == 0
    assert all(bytes(backing.readable(grant.slot)[:4]) == b"mine" for grant in held)
    assert all(directory.arena.state(grant.slot) is SlotState.RETIRED for grant in held)
    for grant in held:
        directory.arena.let_go(grant)
    assert directory.arena.free_slots == LAYERS


def test_a_tail_slot_becomes_the_replica_or_is_freed() -> None:
    directory = make_directory()
    first, second = make_history(directory, 1), make_history(directory, 1)
    assert first.chunks[0] is second.chunks[0]
    assert directory.arena.used_slots == LAYERS
    record = first.chunks[0]
    assert [directory.arena.state(grant.slot) for grant in record.grants if grant] == [SlotState.PUBLISHED] * LAYERS


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_any_order_of_calls_loses_no_row_and_no_slot(seed: int) -> None:
    """Each chunk in use has a valid replica of every layer at any time, and every slot one owner."""
    source, directory = random.Random(seed), make_directory(slots=9)
    users: list[ChunkRecord] = []
    held: list[object] = []
    for _ in range(80):
        action = source.choice(["acquire", "drop", "evict", "promote", "write", "fail", "done", "hold", "let_go"])
        record = source.choice(users) if users else None
        if action == "acquire":
            new = directory.acquire(make_chunk(source.randrange(5)).identity)
            users.append(new)
            while new.file is not FileReplicaState.PUBLISHED and new.resident < LAYERS:
                if not directory.arena.free_slots:
                    directory.drop(users.pop())
                    break
                fill(directory, new, new.grants.index(None))
        elif record is None:
            continue
        elif action == "drop":
            users.remove(record)
            directory.drop(record)
        elif action == "evict":
            layer = source.randrange(LAYERS)
            if record.evictable or record.grants[layer] is None:
                directory.evict(record, layer)
            else:
                with pytest.raises(StateError):
                    directory.evict(record, layer)
        elif action == "promote" and None in record.grants and directory.arena.free_slots:
            fill(directory, record, record.grants.index(None))
        elif action == "write" and record.file in (FileReplicaState.ABSENT, FileReplicaState.FAILED):
            directory.mark(record, FileReplicaState.WRITING)
        elif action in ("fail", "done") and record.file is FileReplicaState.WRITING:
            state = FileReplicaState.FAILED if action == "fail" else FileReplicaState.PUBLISHED
            directory.mark(record, state)
        elif action == "hold":
            held += directory.hold(record)
        elif action == "let_go" and held:
            directory.arena.let_go(held.pop(source.randrange(len(held))))  # type: ignore[arg-type]
        owners = [grant.slot for item in directory for grant in item.grants if grant is not None]
        assert len(owners) == len(set(owners))
        slots = set(owners) | {grant.slot for grant in held}  # type: ignore[attr-defined]
        assert directory.arena.used_slots == len(slots)
        assert {item.digest for item in directory} == {item.digest for item in users}
        for item in directory:
            assert item.users == sum(user is item for user in users)
            assert item.file is FileReplicaState.PUBLISHED or item.resident == LAYERS
            for grant in item.grants:
                assert grant is None or directory.arena.generations[grant.slot] == grant.generation


def test_a_segment_whose_reader_is_late_may_be_promoted_anew_into_another_slot() -> None:
    directory = make_directory()
    (record,) = make_history(directory, 1).chunks
    directory.mark(record, FileReplicaState.WRITING)
    directory.mark(record, FileReplicaState.PUBLISHED)
    directory.evict(record, 1)
    late = directory.reserve(record, 1)
    assert late is not None
    with pytest.raises(StateError, match="promote_reserved"):
        directory.reserve(record, 1)
    directory.disown(record, 1, late)
    again = directory.reserve(record, 1)
    assert again is not None
    assert again.slot != late.slot
    directory.reclaim({late, again})
    assert record.residency[1] is ResidencyState.PROMOTE_RESERVED
    used = directory.arena.used_slots
    directory.abandon(record, 1, late)
    assert directory.arena.used_slots == used - 1
    assert record.residency[1] is ResidencyState.PROMOTE_RESERVED, "the late one speaks for itself alone"
    directory.publish(record, 1, again)
    assert record.grants[1] == again


def test_a_promotion_goes_on_when_its_segment_came_another_way_meanwhile() -> None:
    directory = make_directory()
    record = make_published(directory)
    directory.evict(record, 0)
    coming = directory.reserve(record, 0)
    tail = directory.arena.reserve("tail")
    assert coming is not None
    assert tail is not None
    directory.arena.publish(tail, "tail")
    directory.adopt(record, 0, tail, "tail")
    directory.evict(record, 0)
    assert record.residency[0] is ResidencyState.PROMOTE_RESERVED
    directory.publish(record, 0, coming)
    assert (record.grants[0], record.moving[0]) == (coming, None)


def test_the_end_of_an_older_promotion_does_not_end_a_later_one() -> None:
    directory = make_directory()
    record = make_published(directory)
    directory.evict(record, 0)
    older = directory.reserve(record, 0)
    assert older is not None
    directory.abandon(record, 0, older)
    later = directory.reserve(record, 0)
    assert later is not None
    with pytest.raises(StateError, match="released before"):
        directory.abandon(record, 0, older)
    assert record.residency[0] is ResidencyState.PROMOTE_RESERVED
    directory.publish(record, 0, later)
    assert record.resident == LAYERS


@pytest.mark.parametrize("line", range(1, 60))
def test_an_interrupt_fences_no_valid_copy(line: int) -> None:
    """Whatever line an interrupt comes before while the authority moves, the bytes that are there stay readable."""
    directory = make_directory()
    host_of(directory)
    record = make_history(directory, 1).chunks[0]
    for layer in range(LAYERS):
        fill_host(directory, record, layer)
    directory.mark(record, FileReplicaState.WRITING)
    directory.mark(record, FileReplicaState.PUBLISHED)
    interrupt(lambda: directory.mark(record, FileReplicaState.REVOKED), line)
    directory.reclaim({grant for grant in record.grants if grant is not None})
    for layer in range(LAYERS):
        assert record.valid(record.device, layer)
        assert record.valid(record.host, layer)


@pytest.mark.parametrize("line", range(1, 60))
def test_an_interrupted_publication_can_be_repeated(line: int) -> None:
    directory = make_directory()
    record = make_published(directory)
    for layer in range(LAYERS):
        directory.evict(record, layer)
    grant = directory.reserve(record, 1)
    assert grant is not None
    interrupt(lambda: directory.publish(record, 1, grant), line)
    if record.grants[1] is None:
        directory.publish(record, 1, grant)
    assert record.valid(record.device, 1)
    assert record.residency[1] is ResidencyState.DEVICE_VISIBLE


@pytest.mark.parametrize("line", range(1, 50))
def test_an_interrupt_leaves_no_host_copy_without_its_checksum(line: int) -> None:
    """Such a copy would count as damaged when it is read, and may be the last."""
    directory = make_directory()
    host = host_of(directory)
    record = make_resident(directory)
    grant = host.reserve(record.key(0))
    assert grant is not None
    interrupt(lambda: directory.publish_host(record, 0, grant, b"checksum"), line)
    assert (record.host.grants[0], record.host.checksums[0]) in ((grant, b"checksum"), (None, None))
