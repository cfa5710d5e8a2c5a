"""The plan of a request: complete tables ahead of every layer, within the slots, whoever else wants them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import LAYERS, LAYOUT, FaultyFiles
from directory_parts import SIZE, extend, make_history, make_ids, segment_bytes

from kvstrata.contract.receipts import StepReceipt
from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.credits import Credits
from kvstrata.errors import BudgetError, DamagedError, Reason, StateError, StoreError
from kvstrata.placement.layer_ahead import LayerAhead
from kvstrata.store.directory import Directory
from kvstrata.store.history import History
from kvstrata.store.promotion import Promoter
from kvstrata.store.publication import Publisher
from kvstrata.tiers.device import HostTensorBacking
from kvstrata.tiers.files import FileTier, OsFiles
from kvstrata.tiers.memory import MemoryArena

CHUNKS = 4
Open = Callable[..., "Parts"]


class Parts:
    """A directory of `slots` slots over a file tier, with its threads."""

    def __init__(self, root: Path, slots: int, files: Any = None, credits: Credits | None = None) -> None:  # noqa: A002
        self.backing = HostTensorBacking(LAYOUT.segment_bytes, slots)
        self.directory = Directory(MemoryArena(LAYOUT.segment_bytes, self.backing), LAYERS)
        tier = FileTier(root, files=files)
        self.publisher = Publisher(self.directory, tier, LAYOUT)
        self.publisher.start()
        self.promoter = Promoter(self.directory, tier, LAYOUT, credits=credits)

    def plan(self, history: History, *, writable: bool = True, depth: int = 2) -> LayerAhead:
        publisher = self.publisher if writable else None
        return LayerAhead(
            [history], LAYOUT, self.backing.segment, self.promoter, publisher, lambda slots: 1000 * slots, depth
        )

    def close(self) -> None:
        self.publisher.stop()
        self.promoter.close()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Open]:
    opened: list[Parts] = []

    def make(slots: int, files: Any = None, credits: Credits | None = None) -> Parts:  # noqa: A002
        opened.append(Parts(tmp_path, slots, files, credits))
        return opened[-1]

    yield make
    for item in opened:
        item.close()


def publish(parts: Parts, history: History) -> None:
    for record in history.chunks:
        parts.publisher.submit(record)
    parts.publisher.wait()


def step(plan: LayerAhead, rows: int = 1) -> StepReceipt:
    """One step in which every layer finds the right bytes in its table."""
    (history,) = plan.histories
    start = history.frontier
    plan.begin_step(rows)
    for layer in range(LAYERS):
        (table,) = plan.before_layer(layer)
        assert table.capacity >= start + rows
        for index in range(len(history.chunks)):
            ids = history.token_ids[index * SIZE : (index + 1) * SIZE]
            assert table.segments[index].numpy().tobytes() == segment_bytes(ids, layer)
        plan.after_layer(layer)
    sealed = history.commit(rows, make_ids(rows, start))
    return plan.end_step(len(sealed))


@pytest.mark.parametrize(
    ("slots", "moved", "staged"),
    [
        (LAYERS * (CHUNKS + 1), 0, 0),
        (LAYERS * CHUNKS, 3, 6),
        (LAYERS + 2 * CHUNKS, 4, 8),
        (LAYERS + CHUNKS + 1, 4, 4),
        (LAYERS + CHUNKS, 4, 4),
    ],
)
def test_tables_are_complete_in_any_memory(parts: Open, slots: int, moved: int, staged: int) -> None:
    opened = parts(LAYERS * (CHUNKS + 1))
    history = make_history(opened.directory, CHUNKS)
    publish(opened, history)
    for record in history.chunks:
        for layer in range(LAYERS):
            opened.directory.evict(record, layer)
    spare = [opened.directory.arena.reserve("spare") for _ in range(LAYERS * (CHUNKS + 1) - slots)]
    assert None not in spare
    plan = opened.plan(history)
    receipts = [step(plan) for _ in range(3)]
    assert [receipt.moved_segments for receipt in receipts[1:]] == [LAYERS * moved] * 2
    assert receipts[0].moved_segments == LAYERS * CHUNKS
    assert plan.staged_peak >= staged
    size = LAYOUT.segment_bytes
    for receipt in receipts:
        assert receipt.moved_bytes == receipt.moved_segments * size
        rows = receipt.visible * LAYERS * LAYOUT.row_bytes
        assert receipt.resident_bytes + receipt.moved_bytes == rows
    assert opened.directory.arena.peak_slots <= opened.directory.arena.slots
    plan.abort_step()
    resident = sum(record.resident for record in history.chunks)
    assert opened.directory.arena.used_slots == len(spare) + LAYERS + resident


def test_one_slot_too_few_is_refused_with_the_number_that_would_do(parts: Open) -> None:
    opened = parts(LAYERS * (CHUNKS + 1))
    history = make_history(opened.directory, CHUNKS)
    publish(opened, history)
    spare = [opened.directory.arena.reserve("spare") for _ in range(LAYERS)]
    plan = opened.plan(history)
    plan.yield_memory()
    more = [opened.directory.arena.reserve("spare") for _ in range(LAYERS * CHUNKS - LAYERS - CHUNKS + 1)]
    assert None not in more
    with pytest.raises(BudgetError) as refusal:
        plan.begin_step(1)
    assert refusal.value.reason is Reason.BUDGET_TOO_SMALL
    assert refusal.value.required_bytes == 1000 * (LAYERS + CHUNKS + len(spare) + len(more))
    opened.directory.arena.release(more[0])  # type: ignore[arg-type]
    step(plan)


def test_making_room_waits_for_the_writes(parts: Open) -> None:
    """Chunks that were never submitted are written first; none is evicted before it is safe."""
    opened = parts(LAYERS * CHUNKS + 1)
    history = make_history(opened.directory, CHUNKS)
    receipt = step(opened.plan(history))
    assert {record.file for record in history.chunks} >= {FileReplicaState.PUBLISHED}
    assert receipt.moved_segments > 0


def test_without_a_writable_store_nothing_unsafe_is_evicted(parts: Open) -> None:
    opened = parts(LAYERS * CHUNKS + 1)
    history = make_history(opened.directory, CHUNKS)
    plan = opened.plan(history, writable=False)
    with pytest.raises(BudgetError, match="writable store") as refusal:
        plan.begin_step(1)
    assert refusal.value.reason is Reason.BUDGET_TOO_SMALL
    assert {record.resident for record in history.chunks} == {LAYERS}


def test_a_full_disk_is_refused_and_tried_again_by_the_next_step(parts: Open) -> None:
    files = FaultyFiles(named={"pwritev": errno.ENOSPC})
    opened = parts(LAYERS * CHUNKS + 1, files)
    history = make_history(opened.directory, CHUNKS)
    plan = opened.plan(history)
    for _ in range(2):
        with pytest.raises(StoreError) as refusal:
            plan.begin_step(1)
        assert refusal.value.reason is Reason.STORE_FULL
        assert {record.resident for record in history.chunks} == {LAYERS}
    files.named.clear()
    step(plan)


def test_a_chunk_that_is_valid_nowhere_is_named(parts: Open) -> None:
    """Another request found its file damaged, and this one holds a part of it."""
    opened = parts(LAYERS * CHUNKS + 1)
    history = make_history(opened.directory, CHUNKS)
    publish(opened, history)
    lost = history.chunks[1]
    opened.directory.evict(lost, 0)
    opened.directory.mark(lost, FileReplicaState.REVOKED)
    opened.publisher.tier.revoke(lost.digest)
    with pytest.raises(DamagedError) as failure:
        step(opened.plan(history))
    assert failure.value.reason is Reason.CHUNK_MISSING
    assert failure.value.chunk == lost.digest.hex()


def test_an_aborted_step_keeps_no_slot_of_its_own(parts: Open) -> None:
    opened = parts(LAYERS + CHUNKS)
    history = History(opened.directory, make_history(opened.directory, 0).context)
    for index in range(CHUNKS):
        plan = opened.plan(history)
        plan.begin_step(SIZE)
        plan.abort_step()
        extend(history, make_ids(SIZE, index))
        publish(opened, history)
        plan.yield_memory()
    assert opened.directory.arena.used_slots == 0
    plan = opened.plan(history)
    for layers in range(LAYERS + 1):
        plan.begin_step(1)
        for layer in range(layers):
            plan.before_layer(layer)
            if layer + 1 < layers:
                plan.after_layer(layer)
        plan.abort_step()
        plan.yield_memory()
        assert opened.directory.arena.used_slots == LAYERS
    step(plan)


def test_a_table_whose_slot_changed_hands_is_refused(parts: Open) -> None:
    opened = parts(LAYERS * (CHUNKS + 1))
    history = make_history(opened.directory, CHUNKS)
    publish(opened, history)
    plan = opened.plan(history)
    step(plan)
    plan.begin_step(1)
    opened.directory.evict(history.chunks[0], 1)
    opened.directory.arena.reserve("somebody else")
    plan.before_layer(0)
    with pytest.raises(StateError, match="changed hands") as refusal:
        plan.before_layer(1)
    assert refusal.value.reason is Reason.NOT_COMMITTED
    plan.abort_step()


def test_yielding_waits_for_writes_and_keeps_what_is_unsafe(parts: Open) -> None:
    opened = parts(LAYERS * CHUNKS)
    history = make_history(opened.directory, CHUNKS - 1)
    for record in history.chunks:
        opened.publisher.submit(record)
    plan = opened.plan(history)
    plan.yield_memory()
    assert opened.directory.arena.used_slots == 0
    unsafe = make_history(opened.directory, 1, seed=70)
    opened.plan(unsafe).yield_memory()
    assert unsafe.chunks[0].resident == LAYERS


def walk(plan: LayerAhead, *rows: int, known: int = 100) -> StepReceipt:
    """One step of several histories in which every layer finds what each history still sees in the right table.

    known: chunks with bytes that stand for their tokens.
    """
    plan.begin_step(*rows)
    starts = [history.frontier for history in plan.histories]
    for layer in range(LAYERS):
        tables = plan.before_layer(layer)
        assert len(tables) == len(plan.histories)
        window = plan.windows[layer]
        for history, table, start in zip(plan.histories, tables, starts, strict=True):
            first = 0 if window is None else max(0, start + 1 - window) // SIZE
            for index in range(first, min(known, len(history.chunks))):
                ids = history.token_ids[index * SIZE : (index + 1) * SIZE]
                assert table.segments[index].numpy().tobytes() == segment_bytes(ids, layer)
        plan.after_layer(layer)
    sealed = 0
    for history, count, start in zip(plan.histories, rows, starts, strict=True):
        if count:
            sealed += len(history.commit(count, make_ids(count, start)))
    return plan.end_step(sealed)


@pytest.mark.parametrize("spare", [0, 1, LAYERS, 3 * LAYERS])
def test_histories_hold_and_read_what_they_share_once(parts: Open, spare: int) -> None:
    shared, own = 3, 2
    opened = parts(2 * LAYERS + (shared + 2 * own) + spare)
    first = make_history(opened.directory, 1)
    histories = [first]
    for seed in (1, 2):
        for index in range(1, shared):
            extend(first, make_ids(SIZE, index)) if seed == 1 else None
        publish(opened, first)
        opened.plan(first).yield_memory()
        histories.append(first.fork())  # type: ignore[arg-type]
        for index in range(own):
            extend(histories[-1], make_ids(SIZE, 100 * seed + index))
            publish(opened, histories[-1])
            opened.plan(histories[-1]).yield_memory()
    first.close()
    plan = LayerAhead(
        histories[1:], LAYOUT, opened.backing.segment, opened.promoter, opened.publisher, lambda slots: 1000 * slots
    )
    receipts = [walk(plan, 1, 1) for _ in range(3)]
    assert receipts[0].moved_segments == LAYERS * (shared + 2 * own)
    assert receipts[0].rows == 2
    assert opened.directory.arena.peak_slots <= opened.directory.arena.slots
    assert walk(plan, 0, 1).rows == 1
    plan.replace(histories[2:])
    assert walk(plan, 1).visible == (shared + own) * SIZE + 5


@pytest.mark.parametrize("spare", [0, 1, LAYERS, 4 * LAYERS])
def test_layers_bring_back_what_their_window_shows(parts: Open, spare: int) -> None:
    """One layer reads everything, the others the last one or two chunks."""
    window, chunks = SIZE + 1, 6
    opened = parts(LAYERS + chunks + 1 + spare)
    history = History(opened.directory, make_history(opened.directory, 0).context)
    for index in range(chunks):
        extend(history, make_ids(SIZE, index))
        publish(opened, history)
        opened.plan(history).yield_memory()
    windows = [None, *[window] * (LAYERS - 1)]
    plan = LayerAhead(
        [history],
        LAYOUT,
        opened.backing.segment,
        opened.promoter,
        opened.publisher,
        lambda slots: 1000 * slots,
        windows=windows,
    )
    receipt = walk(plan, 1, known=chunks)
    assert receipt.moved_segments == chunks + LAYERS - 1
    receipts = [walk(plan, 1, known=chunks) for _ in range(SIZE)]
    assert max(item.moved_segments for item in receipts) <= chunks + 1 + 2 * (LAYERS - 1)
    if spare == 4 * LAYERS:
        assert receipts[-1].moved_segments == 0
    total = receipts[-1].moved_bytes + receipts[-1].resident_bytes
    assert total < (chunks + 2 + 2 * (LAYERS - 1)) * LAYOUT.segment_bytes


def test_a_window_shorter_than_the_tail_needs_no_sealed_chunk(parts: Open) -> None:
    opened = parts(2 * LAYERS)
    history = History(opened.directory, make_history(opened.directory, 0).context)
    windows = [2] * LAYERS
    plan = LayerAhead(
        [history],
        LAYOUT,
        opened.backing.segment,
        opened.promoter,
        opened.publisher,
        lambda slots: slots,
        windows=windows,
    )
    for step_number in range(6 * SIZE):
        receipt = walk(plan, 1, known=0)
        for record in history.chunks:
            opened.publisher.submit(record)
        opened.publisher.wait()
        assert receipt.moved_segments == 0, step_number
    assert len(history.chunks) == 6


def test_slots_of_a_longer_step_that_was_cut_short_are_used(parts: Open) -> None:
    opened = parts(3 * LAYERS)
    first, second = (make_history(opened.directory, 0) for _ in range(2))
    plan = opened.plan(first)
    plan.replace([first, second])
    plan.begin_step(2 * SIZE + 1, 0)
    assert opened.directory.arena.free_slots == 0
    plan.abort_step()
    plan.begin_step(SIZE, SIZE + 1)
    assert (len(first.tail), len(second.tail)) == (1, 2)
    plan.abort_step()
    plan.begin_step(0, 1)
    assert (len(first.tail), len(second.tail)) == (0, 1)
    plan.abort_step()


class _SlowWrites(OsFiles):
    def pwritev(self, fd: int, buffers: Any, offset: int, /) -> int:
        time.sleep(0.05)
        return os.pwritev(fd, buffers, offset)


def test_slots_that_a_write_still_holds_are_waited_for(parts: Open) -> None:
    """Their history is closed, and they are nobody's; they are free as soon as the write has ended."""
    opened = parts(LAYERS, _SlowWrites())
    history = make_history(opened.directory, 1)
    opened.publisher.submit(history.chunks[0])
    history.close()
    assert opened.directory.arena.free_slots < LAYERS
    receipt = step(opened.plan(History(opened.directory, history.context)))
    assert receipt.stall_s > 0


@pytest.mark.parametrize("short", ["pinned", "staging", "link", "queue"])
def test_credits_for_one_layer_are_enough_for_a_plan_of_two(parts: Open, short: str) -> None:
    """What is read ahead waits for credits that the layer before it still holds."""
    layer = CHUNKS * LAYOUT.segment_bytes
    least = {"pinned": layer, "staging": layer, "link": layer, "queue": 1}
    ample = {name: 9 * amount for name, amount in least.items()}
    opened = parts(LAYERS + 2 * CHUNKS, credits=Credits(**ample | {short: least[short]}))
    history = make_history(opened.directory, 0)
    for index in range(CHUNKS):
        extend(history, make_ids(SIZE, index))
        opened.publisher.submit(history.chunks[index])
        opened.publisher.wait()
        for number in range(LAYERS):
            opened.directory.evict(history.chunks[index], number)
    plan = opened.plan(history)
    receipts = [step(plan) for _ in range(2)]
    assert [receipt.moved_segments for receipt in receipts] == [LAYERS * CHUNKS] * 2
    assert opened.promoter.queue.totals.refused == 0
    plan.close()
    assert opened.promoter.pool.outstanding == ()
