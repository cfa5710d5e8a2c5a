"""The plan of a step that chooses: what is asked for comes in, and reads ahead give way to what is needed now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chunks_and_faults import LAYERS, LAYOUT, FaultyFiles
from directory_parts import SIZE, make_history, make_ids, segment_bytes

from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.credits import Credits
from kvstrata.errors import DamagedError, Reason, StateError, StoreError
from kvstrata.placement.on_demand import Fetched, OnDemand
from kvstrata.store.directory import Directory
from kvstrata.store.history import History
from kvstrata.store.promotion import Promoter
from kvstrata.store.publication import Publisher
from kvstrata.tiers.device import HostTensorBacking
from kvstrata.tiers.files import FileTier
from kvstrata.tiers.memory import MemoryArena

CHUNKS = 4
ALL = tuple(range(LAYERS))
SEGMENT = LAYOUT.segment_bytes
Open = Callable[..., "Parts"]


class Parts:
    """A history of `CHUNKS` chunks in files, over `slots` slots."""

    def __init__(self, root: Path, slots: int, files: FaultyFiles | None = None, **options: Credits) -> None:
        self.backing = HostTensorBacking(SEGMENT, slots + CHUNKS * LAYERS)
        self.directory = Directory(MemoryArena(SEGMENT, self.backing), LAYERS)
        tier = FileTier(root, files=files)
        self.publisher = Publisher(self.directory, tier, LAYOUT)
        self.publisher.start()
        self.promoter = Promoter(self.directory, tier, LAYOUT, **options)
        self.history = make_history(self.directory, CHUNKS)
        for record in self.history.chunks:
            self.publisher.submit(record)
        self.publisher.wait()
        for record in self.history.chunks:
            assert record.file is FileReplicaState.PUBLISHED
            for layer in ALL:
                self.directory.evict(record, layer)
        # Somebody else has all but `slots`.
        self.other = History(self.directory, self.history.context)
        arena = self.directory.arena
        self.taken = [arena.reserve(("other", n)) for n in range(CHUNKS * LAYERS)]
        self.plan = OnDemand(
            [self.history],
            LAYOUT,
            self.backing.segment,
            self.promoter,
            self.publisher,
            lambda slots: 1000 * slots,
        )

    def bytes_of(self, layer: int, chunk: int) -> bytes:
        return self.plan.tables[0].layers[layer].segments[chunk].numpy().tobytes()

    def require(self, layer: int, *chunks: int) -> None:
        for chunk in chunks:
            assert self.bytes_of(layer, chunk) == segment_bytes(make_ids(SIZE, chunk), layer)

    def close(self) -> None:
        self.plan.close()
        self.publisher.stop()
        self.promoter.close()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Open]:
    opened: list[Parts] = []

    def make(slots: int, files: FaultyFiles | None = None, **options: Credits) -> Parts:
        opened.append(Parts(tmp_path, slots, files, **options))
        return opened[-1]

    yield make
    for item in opened:
        item.close()


ROOM = LAYERS + CHUNKS
"""One open chunk in every layer, and one layer's segments: the least that the exact plan needs."""


def test_only_what_is_asked_for_is_read(parts: Open) -> None:
    found = parts(ROOM)
    plan = found.plan
    plan.begin_choosing(ALL, 1)
    for layer in ALL:
        plan.before_layer(layer)
        assert not plan.batches
        assert plan.arrive(layer, 0, [1, 3]) == Fetched(2 * SEGMENT, 0, pytest.approx(0, abs=60))
        found.require(layer, 1, 3)
        assert plan.arrive(layer, 0, [3]) == Fetched(), "it is there"
        plan.after_layer(layer)
    found.history.commit(1, [7])
    receipt = plan.end_step(0)
    assert (receipt.moved_bytes, receipt.moved_segments) == (2 * LAYERS * SEGMENT, 2 * LAYERS)
    assert plan.lower == "files"


def test_an_entry_that_was_not_asked_for_is_not_to_be_read(parts: Open) -> None:
    plan = parts(ROOM).plan
    plan.begin_choosing(ALL, 1)
    plan.arrive(0, 0, [1])
    with pytest.raises(StateError):
        plan.tables[0].verified_chunks(0, [1, 2])


def test_layers_that_do_not_choose_get_everything(parts: Open) -> None:
    found = parts(ROOM)
    plan = found.plan
    plan.begin_choosing((1,), 1)
    plan.before_layer(0)
    found.require(0, *range(CHUNKS))
    plan.after_layer(0)
    plan.before_layer(1)
    plan.arrive(1, 0, [2])
    found.require(1, 2)
    plan.after_layer(1)
    plan.before_layer(2)
    found.require(2, *range(CHUNKS))
    plan.after_layer(2)


def test_what_was_fetched_ahead_is_waited_for_once(parts: Open) -> None:
    found = parts(ROOM + CHUNKS)
    plan = found.plan
    plan.begin_choosing(ALL, 1)
    assert plan.fetch(1, 0, [0, 2])
    assert plan.fetch(1, 0, [2])
    assert len(plan.batches) == 1, "the second one asks for nothing new"
    plan.before_layer(0)
    plan.arrive(0, 0, [0])
    plan.after_layer(0)
    plan.before_layer(1)
    assert plan.arrive(1, 0, [0, 2, 3]).file_bytes == 3 * SEGMENT
    found.require(1, 0, 2, 3)
    assert plan.staged_peak >= 2


def test_a_fetch_ahead_without_room_is_none(parts: Open) -> None:
    found = parts(ROOM)
    plan = found.plan
    plan.begin_choosing(ALL, 1)
    plan.arrive(0, 0, [0, 1, 2])
    used = found.directory.arena.used_slots
    assert not plan.fetch(1, 0, [0, 1, 2])
    assert found.directory.arena.used_slots == used
    plan.after_layer(0)
    assert plan.arrive(1, 0, [0, 1, 2]).file_bytes == 3 * SEGMENT
    found.require(1, 0, 1, 2)


def test_reads_ahead_give_way_to_what_is_needed_now(parts: Open) -> None:
    found = parts(ROOM)
    plan = found.plan
    plan.begin_choosing(ALL, 1)
    assert plan.fetch(1, 0, [0, 1])
    assert plan.fetch(1, 0, [2])
    assert plan.arrive(0, 0, list(range(CHUNKS))).file_bytes == CHUNKS * SEGMENT
    found.require(0, *range(CHUNKS))
    assert not plan.batches
    plan.after_layer(0)
    assert plan.arrive(1, 0, [0, 1, 2]).file_bytes == 3 * SEGMENT, "they are read when their layer comes"
    found.require(1, 0, 1, 2)


def test_reads_that_the_plan_staged_give_way_too(parts: Open) -> None:
    found = parts(ROOM + 1)
    plan = found.plan
    plan.begin_choosing((0, 1), 1)
    staged = len(plan.batches)
    plan.before_layer(0)
    plan.arrive(0, 0, list(range(CHUNKS)))
    found.require(0, *range(CHUNKS))
    assert staged <= 1
    plan.after_layer(0)
    plan.before_layer(1)
    plan.arrive(1, 0, list(range(CHUNKS)))
    plan.after_layer(1)
    plan.before_layer(2)
    found.require(2, *range(CHUNKS))


def test_a_step_that_ends_early_leaves_no_slot_behind(parts: Open) -> None:
    found = parts(ROOM + CHUNKS)
    plan = found.plan
    plan.begin_choosing(ALL, 1)
    before = found.directory.arena.used_slots
    plan.fetch(0, 0, [0])
    plan.fetch(1, 0, [1, 2])
    plan.abort_step()
    assert not plan.batches
    assert found.directory.arena.used_slots == before
    plan.begin_choosing(ALL, 1)
    plan.arrive(0, 0, [0])
    found.require(0, 0)


def test_bytes_that_are_damaged_are_named(parts: Open, tmp_path: Path) -> None:
    found = parts(ROOM)
    path = next(tmp_path.rglob(f"*{found.history.chunks[2].digest.hex()}*"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    plan = found.plan
    plan.begin_choosing(ALL, 1)
    plan.arrive(LAYERS - 1, 0, [1])
    with pytest.raises(DamagedError) as caught:
        plan.arrive(LAYERS - 1, 0, [2])
    assert caught.value.chunk == found.history.chunks[2].digest.hex()
    plan.abort_step()


def test_without_credits_a_fetch_ahead_is_none_and_an_arrival_says_so(parts: Open) -> None:
    found = parts(ROOM, credits=Credits(SEGMENT, SEGMENT, SEGMENT, 4))
    plan = found.plan
    plan.begin_choosing(ALL, 1)
    assert not plan.fetch(1, 0, [0, 1])
    with pytest.raises(StoreError) as caught:
        plan.arrive(1, 0, [0, 1])
    assert caught.value.reason is Reason.CREDIT_PRESSURE
    plan.abort_step()
    plan.begin_choosing(ALL, 1)
    assert plan.arrive(1, 0, [0]).file_bytes == SEGMENT


def test_what_came_in_by_tier() -> None:
    assert Fetched(5, 0, 0.1).read_bytes("link") == (("link", 5),)
    assert Fetched(5, 7).read_bytes("files") == (("files", 5), ("host", 7))
    assert Fetched().read_bytes("files") == ()
