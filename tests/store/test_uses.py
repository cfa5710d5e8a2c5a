"""What an open request relies on is leased, counted, renewed and let go of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chunks_and_faults import make_chunk

from kvstrata.errors import Reason
from kvstrata.store import Store
from kvstrata.store.uses import ChunksInUse

CHUNKS = [make_chunk(seed) for seed in range(3)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as store:
        for chunk in CHUNKS:
            store.tier.write(*chunk.arguments)
        yield store


def kept(store: Store) -> set[bytes]:
    """Chunks that cannot be evicted."""
    result = store.evict([chunk.digest for chunk in CHUNKS])
    for chunk in CHUNKS:
        if chunk.digest in result.removed:
            store.tier.write(*chunk.arguments)
    assert {refusal.reason for refusal in result.refused} <= {Reason.CHUNK_PINNED}
    return {refusal.chunk for refusal in result.refused}


def test_held_chunks_stay_until_their_last_use_is_dropped(store: Store) -> None:
    first, second = CHUNKS[0].digest, CHUNKS[1].digest
    assert store.in_use.hold([first, second, first]) == ()
    assert store.in_use.hold([first]) == ()
    assert kept(store) == {first, second}
    store.in_use.drop([first, second])
    assert first in store.in_use
    assert second not in store.in_use
    store.in_use.hold([CHUNKS[2].digest])
    assert kept(store) == {first, CHUNKS[2].digest}
    store.in_use.close()
    assert kept(store) == set()


def test_what_is_not_published_is_named_and_the_others_are_held(store: Store) -> None:
    gone = make_chunk(9).digest
    assert store.in_use.hold([CHUNKS[0].digest, gone]) == (gone,)
    assert (kept(store), gone in store.in_use) == ({CHUNKS[0].digest}, False)


def test_another_process_sees_the_lease_and_its_end(store: Store, tmp_path: Path) -> None:
    store.in_use.hold([CHUNKS[0].digest])
    with Store(tmp_path / "store") as other:
        assert kept(other) == {CHUNKS[0].digest}
        store.close()
        assert kept(other) == set()


def test_leases_are_renewed_when_half_of_their_time_is_over(store: Store) -> None:
    assert store.catalog is not None
    clock, pinned = Clock(), []
    real = store.catalog.pin
    store.catalog.pin = lambda owner, chunks, end: pinned.append((len(chunks), end)) or real(owner, chunks, end)  # type: ignore[method-assign, assignment, func-returns-value]
    uses = ChunksInUse(store.catalog, lease_s=100.0, now=clock)
    uses.renew()
    uses.hold([chunk.digest for chunk in CHUNKS])
    uses.drop([CHUNKS[2].digest])
    clock.now = 1049.0
    uses.renew()
    assert pinned == [(3, 1100.0)]
    clock.now = 1051.0
    uses.renew()
    uses.renew()
    assert pinned == [(3, 1100.0), (2, 1151.0)]
    uses.close()


def test_uses_are_counted_for_the_order_of_leaving(store: Store) -> None:
    assert store.catalog is not None
    store.in_use.hold([CHUNKS[1].digest])
    store.in_use.close()
    uses = {each.chunk: each.uses for each, _ in store.catalog.published()}
    assert uses[CHUNKS[1].digest] == uses[CHUNKS[0].digest] + 1


def test_without_a_catalog_nothing_is_leased_and_nothing_breaks(store: Store, tmp_path: Path) -> None:
    store.close()
    with Store(tmp_path / "store", read_only=True) as reader:
        assert reader.in_use.hold([CHUNKS[0].digest]) == ()
        assert CHUNKS[0].digest in reader.in_use
        reader.in_use.renew()
        reader.in_use.close()
