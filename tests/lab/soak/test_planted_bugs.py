"""A check that is taken out of the store is found by the simulator, and the seed that it names finds it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.contract.states import FileReplicaState, SlotState
from kvstrata.lab.soak import Failure, run_seed
from kvstrata.store import host_cache, transfer_landing
from kvstrata.store.credit_pool import CreditPool
from kvstrata.store.directory import Directory
from kvstrata.store.leases import LeaseTable
from kvstrata.store.replicas import ChunkRecord
from kvstrata.store.transfer_book import TransferBook
from kvstrata.store.transfer_records import TransferOutcome
from kvstrata.tiers.memory import MemoryArena

_SEEDS = range(12)
_STEPS = 3000


def _no_generation_check(patch: pytest.MonkeyPatch) -> None:
    """A reservation is known by slot and owner alone."""

    def check(arena: MemoryArena, grant: Any, owner: Any) -> None:
        if arena._states[grant.slot] is SlotState.FREE or arena._owners[grant.slot] != owner:
            raise host_cache.StateError(host_cache.Reason.NOT_COMMITTED, "another owner's")

    patch.setattr(MemoryArena, "_check", check)


def _credits_twice(patch: pytest.MonkeyPatch) -> None:
    """Credits that were given back are given back again."""
    real = CreditPool.give_back

    def give_back(pool: CreditPool, reservation: Any) -> bool:
        done = real(pool, reservation)
        pool._free = pool._free + reservation.amount
        return done

    patch.setattr(CreditPool, "give_back", give_back)


def _endless_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "_expire_if_due", lambda table, lease: None)


def _last_copy_goes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "valid_copies", lambda directory, record, layer, leaving=None: 99)


def _no_epochs(patch: pytest.MonkeyPatch) -> None:
    def valid(record: ChunkRecord, replica: Any, layer: int | None = None) -> bool:
        return replica.state is FileReplicaState.PUBLISHED and (
            layer is None or replica is record.durable or replica.grants[layer] is not None
        )

    patch.setattr(ChunkRecord, "valid", valid)


def _accept(mismatch: TransferOutcome) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = transfer_landing.verdict

        def verdict(transfer: Any) -> Any:
            outcome, error = real(transfer)
            return (TransferOutcome.READY, None) if outcome is mismatch else (outcome, error)

        patch.setattr(transfer_landing, "verdict", verdict)

    return plant


def _no_host_checksum(patch: pytest.MonkeyPatch) -> None:
    class Equal:
        def update(self, data: Any) -> None: ...

        def digest(self) -> Any:
            return Same()

    class Same(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

    patch.setattr(host_cache, "xxh3_128", Equal)


def _slots_go_under_readers(patch: pytest.MonkeyPatch) -> None:
    def release(arena: MemoryArena, grant: Any) -> None:
        arena._holders[grant.slot] = 0
        arena._free_slot(grant.slot)

    patch.setattr(MemoryArena, "release", release)


def _slots_go_under_copiers(patch: pytest.MonkeyPatch) -> None:
    real = TransferBook.end

    def end(book: TransferBook, waiter: Any, outcome: TransferOutcome, error: Any = None) -> None:
        real(book, waiter, outcome, error)
        if waiter.state is not transfer_landing.WaiterState.READY:
            waiter.destination.release()

    patch.setattr(TransferBook, "end", end)


def _generations_stand_still(patch: pytest.MonkeyPatch) -> None:
    real = MemoryArena._free_slot

    def free(arena: MemoryArena, slot: int) -> None:
        before = arena._generation[slot]
        real(arena, slot)
        arena._generation[slot] = arena.generations[slot] = before - 1

    patch.setattr(MemoryArena, "_free_slot", free)


def _records_stay(patch: pytest.MonkeyPatch) -> None:
    """The last user leaves, and the record stays behind."""
    patch.setattr(Directory, "_forget", lambda directory, record: None)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "generation not checked on publish": (_no_generation_check, "stands no longer was accepted"),
    "credits released twice": (_credits_twice, "credit"),
    "lease expiry ignored": (_endless_leases, "lease"),
    "last copy evicted": (_last_copy_goes, "evict"),
    "epoch not checked": (_no_epochs, "valid copies|fenced"),
    "short copy accepted": (_accept(TransferOutcome.SHORT_COPY), "cause|bytes"),
    "damaged copy accepted": (_accept(TransferOutcome.CHECKSUM_MISMATCH), "cause|bytes"),
    "other layout accepted": (_accept(TransferOutcome.LAYOUT_MISMATCH), "cause|bytes"),
    "host checksum not compared": (_no_host_checksum, "wrong bytes|other bytes"),
    "slot freed under a reader": (_slots_go_under_readers, "reader|held"),
    "slot freed under a copier": (_slots_go_under_copiers, "slot"),
    "generation goes back": (_generations_stand_still, "generation|slot"),
    "record outlives its users": (_records_stay, "users|records"),
}


def _find(patch: pytest.MonkeyPatch, name: str) -> Failure:
    PLANTED[name][0](patch)
    for seed in _SEEDS:
        failure = run_seed(seed, _STEPS).failure
        if failure is not None:
            return failure
    raise AssertionError(f"{name}: not found in {len(_SEEDS) * _STEPS} steps")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_and_its_seed_finds_it_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    failure = _find(monkeypatch, name)
    assert any(part in failure.what for part in PLANTED[name][1].split("|")), failure.what
    again = run_seed(failure.seed, failure.step + 1).failure
    assert again is not None
    assert (again.step, again.what, again.recent) == (failure.step, failure.what, failure.recent)
