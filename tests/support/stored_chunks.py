"""Chunks as a catalog lists them, and trees of them at random."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvstrata.store.leaf_first import Hold


@dataclass(frozen=True)
class Stored:
    """See `StoredChunk`."""

    chunk: bytes
    parent: bytes = b""
    nbytes: int = 10
    last_used: float = 0.0
    uses: int = 1
    hold: Hold = Hold.FREE
    created: float = 0.0


@st.composite
def trees(draw: st.DrawFn) -> list[Stored]:
    """Up to 14 chunks, each with an earlier one or none as its parent, in any order; about a quarter is held."""
    chunks: list[Stored] = []
    for number in range(draw(st.integers(0, 14))):
        parent = draw(st.sampled_from([b"", *(one.chunk for one in chunks)]))
        hold = draw(st.sampled_from([Hold.FREE, Hold.FREE, Hold.FREE, Hold.FREE, Hold.PINNED, Hold.LAST_AUTHORITY]))
        last_used, uses, created = draw(st.integers(0, 20)), draw(st.integers(1, 5)), draw(st.integers(0, 20))
        nbytes = draw(st.integers(1, 30))
        chunks.append(Stored(b"c%d" % number, parent, nbytes, last_used, uses, hold, created))
    return draw(st.permutations(chunks))


def may_leave(chunks: list[Stored], continued: bytes = b"") -> set[bytes]:
    """The reference: free, with no held descendant, and not on the way to `continued`."""
    by_name = {one.chunk: one for one in chunks}
    stays: set[bytes] = set()
    for start in [one.chunk for one in chunks if one.hold is not Hold.FREE] + [continued]:
        name = start
        while name in by_name:
            stays.add(name)
            name = by_name[name].parent
    return set(by_name) - stays
