"""A lease ends on time, and its slots stay until the last reader under it has left."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.states import LeaseState, SlotState
from kvstrata.errors import ConfigurationError, Reason, StateError
from kvstrata.store.leases import Lease, LeaseTable
from kvstrata.tiers.memory import Grant, HostBacking, MemoryArena


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_arena(slots: int = 4) -> MemoryArena:
    return MemoryArena(64, HostBacking(64, slots))


def publish(arena: MemoryArena, owner: str) -> Grant:
    grant = arena.reserve(owner)
    assert grant is not None
    arena.publish(grant, owner)
    return grant


def test_what_is_looked_up_and_never_read_is_not_pinned_for_ever() -> None:
    clock, arena = Clock(), make_arena(1)
    table, grant = LeaseTable(clock), publish(arena, "row")
    lease = table.grant("request", "row", [(arena, grant)], seconds=5)
    arena.release(grant)
    assert arena.free_slots == 0
    clock.now = 4.9
    assert table.expire() == []
    clock.now = 5.0
    assert table.expire() == [lease]
    assert (lease.state, arena.free_slots, len(table)) == (LeaseState.ACKNOWLEDGED, 1, 0)


def test_expiry_under_a_reader_revokes_at_once_and_reclaims_after_it() -> None:
    clock, arena = Clock(), make_arena(1)
    table, grant = LeaseTable(clock), publish(arena, "row")
    lease = table.grant("request", "row", [(arena, grant)], seconds=5)

    def read() -> None:
        with table.reading(lease):
            arena.release(grant)
            clock.now = 6.0
            assert table.expire() == [lease]
            assert (lease.state, arena.state(grant.slot)) == (LeaseState.REVOKED, SlotState.RETIRED)
            assert arena.reserve("another") is None

    with pytest.raises(StateError, match="ended before") as refusal:
        read()
    assert refusal.value.reason is Reason.LEASE_EXPIRED
    assert (lease.state, arena.free_slots) == (LeaseState.ACKNOWLEDGED, 1)


def test_expiry_is_noticed_without_a_sweep() -> None:
    clock, arena = Clock(), make_arena()
    table, grant = LeaseTable(clock), publish(arena, "row")
    lease = table.grant("request", "row", [(arena, grant)], seconds=5)
    with pytest.raises(StateError, match="lease 1 of request"), table.reading(lease):
        clock.now = 5.0
    late = table.grant("request", "row", [(arena, grant)], seconds=5)
    clock.now = 11.0
    body = []
    with pytest.raises(StateError), table.reading(late):
        body.append("entered")
    with pytest.raises(StateError):
        table.renew(late, 5)
    assert body == []


def test_a_renewed_lease_goes_on() -> None:
    clock, arena = Clock(), make_arena()
    table, grant = LeaseTable(clock), publish(arena, "row")
    lease = table.grant("request", "row", [(arena, grant)], seconds=5)
    clock.now = 4.0
    table.renew(lease, 5)
    clock.now = 8.0
    with table.reading(lease):
        pass
    table.release(lease)
    table.release(lease)
    assert (lease.state, len(table)) == (LeaseState.ACKNOWLEDGED, 0)
    with pytest.raises(StateError, match="not held"):
        arena.let_go(grant)


def test_a_cancelled_request_takes_all_its_leases_back_and_nobody_elses() -> None:
    arena = make_arena()
    table, grants = LeaseTable(), [publish(arena, name) for name in "abc"]
    mine = [table.grant("mine", name, [(arena, grant)], 60) for name, grant in zip("ab", grants, strict=False)]
    other = table.grant("other", "c", [(arena, grants[2])], 60)

    def read() -> None:
        with table.reading(mine[0]):
            assert table.revoke("mine") == 2
            assert [lease.state for lease in mine] == [LeaseState.REVOKED, LeaseState.ACKNOWLEDGED]

    with pytest.raises(StateError, match="lease 1 of mine"):
        read()
    assert (mine[0].state, other.state, len(table)) == (LeaseState.ACKNOWLEDGED, LeaseState.GRANTED, 1)


def test_a_slot_that_changed_hands_is_not_leased_and_nothing_stays_pinned() -> None:
    arena = make_arena()
    table, first, second = LeaseTable(), publish(arena, "row"), publish(arena, "row")
    arena.release(second)
    with pytest.raises(StateError, match="generation"):
        table.grant("request", "row", [(arena, first), (arena, second)], 60)
    arena.release(first)
    assert (arena.free_slots, len(table)) == (4, 0)
    with pytest.raises(ConfigurationError, match="seconds=0"):
        table.grant("request", "row", [], 0)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["grant", "enter", "leave", "release", "wait", "expire"]), st.integers(0, 9)))
)
def test_any_order_pins_exactly_what_has_a_live_lease_or_a_reader(steps: list[tuple[str, int]]) -> None:
    clock, arena = Clock(), make_arena()
    table, grant = LeaseTable(clock), publish(arena, "row")
    leases: list[Lease] = []
    readers: list[tuple[Lease, object]] = []
    for action, number in steps:
        if action == "grant":
            leases.append(table.grant("request", "row", [(arena, grant)], 1 + number))
        elif action == "wait":
            clock.now += number
        elif action == "expire":
            table.expire()
        elif action == "enter" and leases:
            lease = leases[number % len(leases)]
            block = table.reading(lease)
            if lease.state is LeaseState.GRANTED and clock.now < lease.expires:
                block.__enter__()
                readers.append((lease, block))
            else:
                with pytest.raises(StateError):
                    block.__enter__()
        elif action == "leave" and readers:
            lease, block = readers.pop(number % len(readers))
            alive = lease.state is LeaseState.GRANTED and clock.now < lease.expires
            if alive:
                block.__exit__(None, None, None)  # type: ignore[attr-defined]
            else:
                with pytest.raises(StateError):
                    block.__exit__(None, None, None)  # type: ignore[attr-defined]
        elif action == "release" and leases:
            table.release(leases[number % len(leases)])
        for lease in leases:
            busy = sum(item is lease for item, _ in readers)
            assert lease.readers == busy
            assert (lease.grants == ()) == (lease.state is LeaseState.ACKNOWLEDGED)
            assert lease.state is not LeaseState.ACKNOWLEDGED or not busy
    arena.release(grant)
    pinned = any(lease.grants for lease in leases)
    assert arena.state(grant.slot) is (SlotState.RETIRED if pinned else SlotState.FREE)
