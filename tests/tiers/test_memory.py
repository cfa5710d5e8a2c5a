"""Slots have one owner at a time, stale grants open nothing, and held bytes stay where they are."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.states import SlotState
from kvstrata.errors import ConfigurationError, Reason, StateError
from kvstrata.lab.soak.interrupts import interrupt
from kvstrata.tiers.memory import Grant, HostBacking, MemoryArena

SIZE = 5000


@pytest.fixture
def arena() -> MemoryArena:
    return MemoryArena(SIZE, HostBacking(SIZE, 3))


def take(arena: MemoryArena, owner: object) -> Grant:
    grant = arena.reserve(owner)
    assert grant is not None
    return grant


def test_a_slot_goes_from_hand_to_hand(arena: MemoryArena) -> None:
    grant = take(arena, "a")
    assert arena.state(grant.slot) is SlotState.RESERVED
    assert (arena.free_slots, arena.used_slots) == (2, 1)
    arena.publish(grant, "a")
    assert arena.state(grant.slot) is SlotState.PUBLISHED
    arena.rename(grant, "a", "b")
    with pytest.raises(StateError):
        arena.hold(grant, "a")
    arena.hold(grant, "b")
    arena.let_go(grant)
    arena.release(grant)
    assert arena.state(grant.slot) is SlotState.FREE
    assert (arena.free_slots, arena.used_slots, arena.peak_slots) == (3, 0, 1)


def test_a_full_arena_says_so_and_stays_as_it_was(arena: MemoryArena) -> None:
    grants = [take(arena, i) for i in range(3)]
    assert len({grant.slot for grant in grants}) == 3
    assert arena.reserve("more") is None
    assert (arena.free_slots, arena.used_slots, arena.peak_slots) == (0, 3, 3)


def test_the_previous_owner_is_told_apart(arena: MemoryArena) -> None:
    """The same slot for the same owner again is still another reservation."""
    old = take(arena, "a")
    arena.publish(old, "a")
    arena.release(old)
    new = take(arena, "a")
    assert new.slot == old.slot
    assert new.generation > old.generation
    for call in (
        lambda: arena.publish(old, "a"),
        lambda: arena.hold(old, "a"),
        lambda: arena.rename(old, "a", "b"),
        lambda: arena.release(old),
        lambda: arena.let_go(old),
    ):
        with pytest.raises(StateError) as refusal:
            call()
        assert refusal.value.reason is Reason.NOT_COMMITTED
    arena.publish(new, "a")


def test_the_owner_is_checked(arena: MemoryArena) -> None:
    grant = take(arena, "a")
    for call in (
        lambda: arena.publish(grant, "b"),
        lambda: arena.hold(grant, "b"),
        lambda: arena.rename(grant, "b", "c"),
    ):
        with pytest.raises(StateError, match="does not belong"):
            call()
    arena.publish(grant, "a")
    with pytest.raises(StateError, match="legal transition"):
        arena.publish(grant, "a")


def test_the_first_stale_reservation_of_many(arena: MemoryArena) -> None:
    owners = ["a", "b", "c"]
    grants = [take(arena, owner) for owner in owners]
    assert arena.first_stale(grants, owners) is None
    arena.rename(grants[1], "b", "x")
    assert arena.first_stale(grants, owners) == 1
    arena.release(grants[0])
    again = take(arena, "a")
    assert again.slot == grants[0].slot
    assert arena.first_stale(grants, owners) == 0


def test_a_held_slot_is_retired_and_freed_by_its_last_holder(arena: MemoryArena) -> None:
    grant = take(arena, "a")
    arena.publish(grant, "a")
    arena.backing.writable(grant.slot)[:] = b"x" * SIZE
    arena.hold(grant, "a")
    arena.hold(grant, "a")
    arena.release(grant)
    assert arena.state(grant.slot) is SlotState.RETIRED
    assert (arena.free_slots, arena.used_slots) == (2, 1)
    others = [take(arena, i) for i in range(2)]
    assert grant.slot not in {other.slot for other in others}
    assert arena.reserve("more") is None
    assert bytes(arena.backing.readable(grant.slot)) == b"x" * SIZE
    with pytest.raises(StateError):
        arena.release(grant)
    arena.let_go(grant)
    assert arena.state(grant.slot) is SlotState.RETIRED
    arena.let_go(grant)
    assert arena.state(grant.slot) is SlotState.FREE
    assert take(arena, "b").slot == grant.slot


def test_letting_go_needs_a_hold(arena: MemoryArena) -> None:
    grant = take(arena, "a")
    with pytest.raises(StateError, match="not held"):
        arena.let_go(grant)


def test_giving_up_twice(arena: MemoryArena) -> None:
    grant = take(arena, "a")
    arena.release(grant)
    with pytest.raises(StateError, match="released before"):
        arena.release(grant)
    assert arena.free_slots == 3


def test_every_change_of_hands_moves_the_epoch(arena: MemoryArena) -> None:
    """Whoever has verified a table in one epoch need not do so again."""
    epochs = [arena.epoch]
    grant = take(arena, "a")
    epochs.append(arena.epoch)
    arena.release(grant)
    epochs.append(arena.epoch)
    assert len(set(epochs)) == 3


def test_slots_do_not_overlap_and_are_aligned() -> None:
    backing = HostBacking(SIZE, 4)
    for slot in range(4):
        backing.writable(slot)[:] = bytes([slot + 1]) * SIZE
    for slot in range(4):
        assert bytes(backing.readable(slot)) == bytes([slot + 1]) * SIZE
    assert backing.stride == 8192


@pytest.mark.parametrize("size", [0, -1])
def test_slots_of_no_bytes(size: int) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        MemoryArena(size, HostBacking(1, 1))
    assert refusal.value.reason is Reason.INVALID_ARGUMENT


def test_an_arena_without_slots() -> None:
    assert MemoryArena(SIZE, HostBacking(SIZE, 0)).reserve("a") is None


@given(st.integers(0, 2**32))
def test_any_order_of_calls_keeps_the_books(seed: int) -> None:
    """Against a model of three lines: no slot has two owners, none is lost, generations only grow."""
    source, arena = random.Random(seed), MemoryArena(8, HostBacking(8, 4))
    owned: dict[Grant, int] = {}
    held: list[Grant] = []
    seen = [0] * 4
    for number in range(60):
        action = source.choice(["reserve", "publish", "hold", "let_go", "release"])
        grant = source.choice(list(owned)) if owned else None
        if action == "reserve":
            fresh = arena.reserve(number)
            busy = {other.slot for other in [*owned, *held]}
            assert (fresh is None) == (len(busy) == 4)
            if fresh is not None:
                assert fresh.slot not in busy
                owned[fresh] = number
        elif action == "publish" and grant and arena.state(grant.slot) is SlotState.RESERVED:
            arena.publish(grant, owned[grant])
        elif action == "hold" and grant:
            arena.hold(grant, owned[grant])
            held.append(grant)
        elif action == "let_go" and held:
            arena.let_go(held.pop(source.randrange(len(held))))
        elif action == "release" and grant:
            arena.release(grant)
            del owned[grant]
        busy = {other.slot for other in [*owned, *held]}
        assert arena.used_slots == len(busy) == 4 - arena.free_slots
        assert arena.peak_slots <= 4
        assert all(now >= before for now, before in zip(arena.generations, seen, strict=True))
        assert all(arena.generations[other.slot] == other.generation for other in owned)
        seen = arena.generations.tolist()


def test_many_threads_never_share_a_slot() -> None:
    arena, inside, clashes = MemoryArena(8, HostBacking(8, 3)), [0] * 3, []

    def work(owner: int) -> None:
        for _ in range(400):
            grant = arena.reserve(owner)
            if grant is None:
                continue
            inside[grant.slot] += 1
            if inside[grant.slot] != 1:
                clashes.append(grant)
            arena.publish(grant, owner)
            inside[grant.slot] -= 1
            arena.release(grant)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert arena.free_slots == 3


def test_reclaiming_retires_what_somebody_still_holds() -> None:
    arena = MemoryArena(SIZE, HostBacking(SIZE, 3))
    held, known = take(arena, "lost"), take(arena, "known")
    arena.publish(held, "lost")
    arena.hold(held, "lost")
    assert arena.reclaim({known}) == 1
    assert (arena.state(held.slot), arena.used_slots) == (SlotState.RETIRED, 2)
    arena.let_go(held)
    assert (arena.state(held.slot), arena.used_slots) == (SlotState.FREE, 1)


@pytest.mark.parametrize("line", range(1, 12))
def test_an_interrupted_last_holder_leaves_no_retired_slot(line: int) -> None:
    arena = MemoryArena(SIZE, HostBacking(SIZE, 3))
    grant = take(arena, "owner")
    arena.hold(grant, "owner")
    arena.release(grant)
    interrupt(lambda: arena.let_go(grant), line)
    if arena.state(grant.slot) is SlotState.RETIRED:
        with contextlib.suppress(StateError):
            arena.let_go(grant)
    arena.reclaim(set())
    assert (arena.used_slots, arena.free_slots) == (0, 3)


@pytest.mark.parametrize("line", range(1, 16))
def test_an_interrupted_loan_stands_in_its_holders_account(line: int) -> None:
    arena, loans = MemoryArena(SIZE, HostBacking(SIZE, 3)), list[Grant]()
    grant = take(arena, "owner")

    def borrow_and_return() -> None:
        arena.hold(grant, "owner", loans)
        arena.let_go(grant, loans)

    interrupt(borrow_and_return, line)
    while loans:
        arena.let_go(loans[-1], loans)
    arena.release(grant)
    assert arena.used_slots == 0, "nobody holds it"
