"""Room is made of what may leave, in the policy's order; a refusal evicts nothing and says what would do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_chunks import Stored, may_leave, trees

from kvstrata.errors import ConfigurationError, Reason, StoreError
from kvstrata.store.admission import AdmissionConfig, AdmissionFilter, AdmissionOutcome, Contender
from kvstrata.store.eviction import POLICIES, ExpectedValueConfig, LfuConfig, LruConfig
from kvstrata.store.leaf_first import Hold
from kvstrata.store.retention import Eviction, EvictOutcome, Held, Retention, RoomOutcome


class Shelf:
    """A durable tier: what it lists, and what becomes of an eviction."""

    def __init__(self, chunks: Iterable[Stored], answers: dict[bytes, EvictOutcome] | None = None) -> None:
        self.chunks = {one.chunk: one for one in chunks}
        self.answers = answers or {}
        self.asked: list[bytes] = []

    def list(self) -> list[Stored]:
        return list(self.chunks.values())

    def evict(self, chunk: bytes) -> EvictOutcome:
        self.asked.append(chunk)
        outcome = self.answers.get(chunk, EvictOutcome.EVICTED)
        if outcome is not EvictOutcome.HELD:
            del self.chunks[chunk]
        return outcome


ABC = [
    Stored(b"a", last_used=3.0, uses=1, created=2.0),
    Stored(b"b", last_used=1.0, uses=5, created=3.0),
    Stored(b"c", last_used=2.0, uses=3, created=1.0),
]


@pytest.mark.parametrize(
    ("policy", "expected"), [("lru", b"bca"), ("lfu", b"acb"), ("fifo", b"cab"), (None, b"bca"), (LfuConfig(7), b"acb")]
)
def test_the_policy_decides(policy: str | None, expected: bytes) -> None:
    shelf = Shelf(ABC)
    receipt = Retention(shelf.list, shelf.evict, policy=policy).make_room(21)
    assert (receipt.outcome, receipt.reason, receipt.freed_bytes) == (RoomOutcome.MADE, None, 30)
    assert b"".join(one.chunk for one in receipt.evicted) == expected
    assert shelf.chunks == {}


def test_value_is_weighed_by_what_a_use_saves() -> None:
    saved = {b"a": 0.001, b"b": 9.0, b"c": 1.0}
    shelf = Shelf(ABC)
    retention = Retention(shelf.list, shelf.evict, policy=ExpectedValueConfig(), saving_s=lambda one: saved[one.chunk])
    retention.make_room(11)
    assert shelf.asked == [b"a", b"c"]


def test_the_receipt_says_what_left_and_why() -> None:
    shelf = Shelf(ABC)
    receipt = Retention(shelf.list, shelf.evict, policy=LruConfig()).make_room(11)
    assert receipt.needed_bytes == 11
    assert receipt.evicted == (
        Eviction(b"b", 10, "Lru", rank=0, uses=5, last_used=1.0),
        Eviction(b"c", 10, "Lru", rank=1, uses=3, last_used=2.0),
    )


def test_no_more_leaves_than_is_needed_unless_more_is_asked_for() -> None:
    for extra, left in ((0, 1), (1, 2), (10, 2), (11, 3), (1000, 3)):
        shelf = Shelf(ABC)
        receipt = Retention(shelf.list, shelf.evict, extra_bytes=extra).make_room(10)
        assert (receipt.outcome, len(receipt.evicted), len(shelf.asked)) == (RoomOutcome.MADE, left, left)


def test_a_refusal_names_what_is_held_and_what_would_do_and_evicts_nothing() -> None:
    shelf = Shelf(
        [
            Stored(b"root", nbytes=7),
            Stored(b"pinned", b"root", nbytes=100, hold=Hold.PINNED),
            Stored(b"too", nbytes=11, hold=Hold.PINNED),
            Stored(b"only", nbytes=50, hold=Hold.LAST_AUTHORITY),
            Stored(b"free", b"pinned", nbytes=20),
        ]
    )
    receipt = Retention(shelf.list, shelf.evict).make_room(30)
    assert (receipt.outcome, receipt.reason, receipt.freed_bytes) == (RoomOutcome.STORE_FULL, Reason.STORE_FULL, 0)
    assert (receipt.evicted, shelf.asked) == ((), [])
    full = receipt.full
    assert full is not None
    assert (full.pinned, full.last_authority, full.blocked) == (Held(2, 111), Held(1, 50), Held(1, 7))
    assert (full.evictable_bytes, full.missing_bytes, full.reason) == (20, 10, Reason.STORE_FULL)
    assert full.cause == (
        "30 bytes are needed and 20 can leave: 111 bytes in 2 chunks are pinned, 50 in 1 are the only copy of rows in "
        "use, 7 in 1 are what those, or the new chunk, continue"
    )
    assert full.next_step == "raise the cap by 10 bytes, or remove sessions with `kvstrata store rm NAME`"


def test_an_empty_store_is_refused_too() -> None:
    receipt = Retention(list, pytest.fail).make_room(1)
    assert receipt.full is not None
    assert (receipt.full.missing_bytes, receipt.full.pinned) == (1, Held())


@given(trees(), st.integers(1, 120), st.sampled_from(sorted(POLICIES)), st.integers(0, 14))
def test_room_is_made_exactly_when_what_may_leave_is_enough(
    chunks: list[Stored], nbytes: int, policy: str, number: int
) -> None:
    shelf, parent = Shelf(chunks), b"c%d" % number
    free = may_leave(chunks, parent)
    enough = sum(one.nbytes for one in chunks if one.chunk in free) >= nbytes
    receipt = Retention(shelf.list, shelf.evict, policy=policy).make_room(nbytes, parent=parent)
    assert (receipt.outcome is RoomOutcome.MADE) == enough
    assert set(shelf.asked) <= free
    assert len(shelf.asked) == len(set(shelf.asked))
    assert receipt.freed_bytes == sum(one.nbytes for one in receipt.evicted)
    if enough:
        assert receipt.freed_bytes >= nbytes
        assert receipt.freed_bytes - receipt.evicted[-1].nbytes < nbytes
    else:
        assert shelf.asked == []
    before = {one.chunk for one in chunks}
    for one in shelf.chunks.values():
        assert one.parent in shelf.chunks or one.parent not in before


def test_what_the_new_chunk_continues_stays() -> None:
    chunks = [Stored(b"root", last_used=0), Stored(b"leaf", b"root", last_used=1), Stored(b"other", last_used=2)]
    shelf = Shelf(chunks)
    receipt = Retention(shelf.list, shelf.evict).make_room(10, parent=b"leaf")
    assert (receipt.outcome, shelf.asked) == (RoomOutcome.MADE, [b"other"])
    assert Retention(shelf.list, shelf.evict).make_room(10, parent=b"leaf").outcome is RoomOutcome.STORE_FULL


def test_a_chunk_that_is_held_by_now_is_passed_over_with_its_parents() -> None:
    chunks = [Stored(b"root", last_used=0), Stored(b"leaf", b"root", last_used=0), Stored(b"other", last_used=9)]
    shelf = Shelf(chunks, {b"leaf": EvictOutcome.HELD})
    receipt = Retention(shelf.list, shelf.evict).make_room(10)
    assert (receipt.outcome, shelf.asked) == (RoomOutcome.MADE, [b"leaf", b"other"])
    assert [one.chunk for one in receipt.evicted] == [b"other"]


def test_what_left_before_the_room_ran_out_after_all_is_in_the_receipt() -> None:
    shelf = Shelf(ABC, {b"c": EvictOutcome.HELD})
    receipt = Retention(shelf.list, shelf.evict).make_room(30)
    assert (receipt.outcome, receipt.freed_bytes) == (RoomOutcome.STORE_FULL, 20)
    assert [one.chunk for one in receipt.evicted] == [b"b", b"a"]
    assert receipt.full is not None
    assert (receipt.full.missing_bytes, receipt.full.blocked) == (10, Held(1, 10))


def test_what_somebody_else_removed_is_room_but_no_eviction() -> None:
    shelf = Shelf(
        [Stored(b"root", last_used=0), Stored(b"leaf", b"root", last_used=0), Stored(b"other", last_used=9)],
        {b"leaf": EvictOutcome.GONE},
    )
    receipt = Retention(shelf.list, shelf.evict).make_room(20)
    assert (receipt.outcome, receipt.freed_bytes) == (RoomOutcome.MADE, 20)
    assert [one.chunk for one in receipt.evicted] == [b"root"]


def test_the_catalog_is_asked_anew() -> None:
    shelf = Shelf(ABC)
    retention = Retention(shelf.list, shelf.evict)
    retention.make_room(10)
    shelf.chunks[b"d"] = Stored(b"d", last_used=-1.0)
    retention.make_room(10)
    assert shelf.asked == [b"b", b"d"]


def judged(*requests: bytes) -> Callable[[Shelf], Retention]:
    admission = AdmissionFilter(AdmissionConfig(counters=1024, sample=1000))
    for chunk in requests:
        admission.record(chunk)
    return lambda shelf: Retention(shelf.list, shelf.evict, admission=admission)


def test_a_newcomer_that_was_asked_for_once_evicts_nothing() -> None:
    shelf = Shelf(ABC)
    receipt = judged(b"new")(shelf).make_room(10, Contender(b"new"))
    assert (receipt.outcome, receipt.reason, receipt.freed_bytes) == (RoomOutcome.DECLINED, Reason.NOT_ADMITTED, 0)
    assert receipt.admission is not None
    assert receipt.admission.outcome is AdmissionOutcome.DECLINED_ONE_HIT
    assert shelf.asked == []


def test_a_newcomer_is_compared_with_all_that_would_leave_for_it() -> None:
    requests = [b"new", b"new", b"new", b"b", b"b", b"c"]
    shelf = Shelf(ABC)
    assert judged(*requests)(shelf).make_room(11, Contender(b"new")).outcome is RoomOutcome.DECLINED
    assert shelf.asked == []
    receipt = judged(*requests)(shelf).make_room(10, Contender(b"new"))
    assert (receipt.outcome, shelf.asked) == (RoomOutcome.MADE, [b"b"])
    assert receipt.admission is not None
    assert (receipt.admission.newcomer_value_s, receipt.admission.victims_value_s) == (3.0, 2.0)


def test_what_must_be_stored_is_not_judged() -> None:
    shelf = Shelf(ABC)
    receipt = judged()(shelf).make_room(10)
    assert (receipt.outcome, receipt.admission, shelf.asked) == (RoomOutcome.MADE, None, [b"b"])


def test_a_saving_below_nothing_counts_as_nothing() -> None:
    shelf = Shelf(ABC)
    admission = AdmissionFilter(AdmissionConfig(counters=1024, sample=1000))
    for chunk in (b"new", b"new", b"b"):
        admission.record(chunk)
    retention = Retention(shelf.list, shelf.evict, admission=admission, saving_s=lambda one: -5.0)
    receipt = retention.make_room(10, Contender(b"new"))
    assert receipt.admission is not None
    assert (receipt.outcome, receipt.admission.victims_value_s) == (RoomOutcome.MADE, 0.0)


def test_a_disk_that_fails_is_the_callers_error() -> None:
    def fail(chunk: bytes) -> EvictOutcome:
        raise StoreError(Reason.STORE_IO, chunk.decode())

    with pytest.raises(StoreError, match="b ") as error:
        Retention(lambda: ABC, fail).make_room(10)
    assert error.value.reason is Reason.STORE_IO


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="nbytes=0 "):
        Retention(list, pytest.fail).make_room(0)
    with pytest.raises(ConfigurationError, match="extra_bytes=-1 "):
        Retention(list, pytest.fail, extra_bytes=-1)
    with pytest.raises(ConfigurationError, match="policy='mru' "):
        Retention(list, pytest.fail, policy="mru")


def test_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "retention.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said = " ".join(re.findall(r"# (.*)$", "\n".join(blocks), re.MULTILINE))
    exec(compile("\n".join(blocks), "retention.md", "exec"), {"__name__": "__main__"})
    assert len(said) > 500
    assert capsys.readouterr().out.split() == said.split()
