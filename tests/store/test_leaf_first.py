"""Children leave before their parents; what is held stays, with all that it continues."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stored_chunks import Stored, may_leave, trees

from kvstrata.store.leaf_first import Hold, LeafFirst


def order_of(chunks: list[Stored]) -> list[bytes]:
    return [one.chunk for one in sorted(chunks, key=lambda one: one.last_used) if one.hold is Hold.FREE]


@given(trees(), st.integers(0, 14))
def test_everything_that_may_leave_does_and_each_after_its_children(chunks: list[Stored], number: int) -> None:
    continued = b"c%d" % number
    left = [one.chunk for one in LeafFirst(chunks, order_of(chunks), continued).drain()]
    assert set(left) == may_leave(chunks, continued)
    assert len(left) == len(set(left))
    for one in chunks:
        if one.chunk in left and one.parent in left:
            assert left.index(one.chunk) < left.index(one.parent)


@given(trees())
def test_the_next_is_always_the_lowest_ranked_leaf(chunks: list[Stored]) -> None:
    ranks = {name: rank for rank, name in enumerate(order_of(chunks))}
    there = {one.chunk: one for one in chunks}
    for one in LeafFirst(chunks, order_of(chunks)).drain():
        leaves = set(there) - {each.parent for each in there.values()}
        assert one.chunk == min((name for name in leaves if name in ranks), key=ranks.__getitem__)
        del there[one.chunk]


def test_a_parent_waits_until_its_child_has_really_gone() -> None:
    parent, child = Stored(b"parent"), Stored(b"child", b"parent")
    leaves = LeafFirst([parent, child], [b"parent", b"child"])
    assert leaves.take() == child
    assert leaves.take() is None
    leaves.left(child)
    assert leaves.take() == parent


def test_a_held_chunk_never_leaves_whatever_the_order_says() -> None:
    chunks = [Stored(b"pinned", hold=Hold.PINNED), Stored(b"only", hold=Hold.LAST_AUTHORITY), Stored(b"free")]
    assert [one.chunk for one in LeafFirst(chunks, [b"pinned", b"only", b"free"]).drain()] == [b"free"]
