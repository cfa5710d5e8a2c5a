"""A manifest comes back as it was written, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from chunks_and_faults import make_context
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.identity import Namespace
from kvstrata.errors import ConfigurationError, Reason, SessionError, StoreError
from kvstrata.sessions.snapshots import SNAPSHOT_FORMAT, Snapshot, chunk_identities


def make_snapshot(tokens: int = 300, frontier: int | None = None, **changes: Any) -> Snapshot:
    context = make_context()
    ids = tuple(range(tokens))
    frontier = tokens if frontier is None else frontier
    chunks = tuple(item.digest for item in chunk_identities(context, ids[:frontier]))
    return replace(Snapshot("chat", 1, context, ids, chunks, frontier, 1000.5), **changes)


@pytest.mark.parametrize(("tokens", "frontier"), [(0, 0), (1, 1), (128, 128), (129, 128), (300, 299), (5, 0)])
def test_encode_and_decode_are_inverse(tokens: int, frontier: int) -> None:
    snapshot = make_snapshot(tokens, frontier)
    assert Snapshot.decode(snapshot.encode(), "here") == snapshot


def test_chunks_are_chained_and_cut_at_boundaries() -> None:
    first, second, third = chunk_identities(make_context(), range(300))
    assert [(item.start, item.stop) for item in (first, second, third)] == [(0, 128), (128, 256), (256, 300)]
    assert (first.parent, second.parent, third.parent) == (b"", first.digest, second.digest)


def test_identities_are_those_of_the_chunks() -> None:
    snapshot = make_snapshot(300, 260)
    assert tuple(item.digest for item in snapshot.identities()) == snapshot.chunks


@given(st.data())
def test_any_flipped_bit_is_damage(data: st.DataObject) -> None:
    raw = bytearray(make_snapshot(3).encode())
    byte = data.draw(st.integers(0, len(raw) - 1))
    raw[byte] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SessionError) as refusal:
        Snapshot.decode(bytes(raw), "here")
    assert refusal.value.reason is Reason.SESSION_DAMAGED
    assert refusal.value.cause.startswith("here is damaged")


@given(st.data())
def test_any_cut_is_damage(data: st.DataObject) -> None:
    raw = make_snapshot(3).encode()
    with pytest.raises(SessionError) as refusal:
        Snapshot.decode(raw[: data.draw(st.integers(0, len(raw) - 1))], "here")
    assert refusal.value.reason is Reason.SESSION_DAMAGED


def _rewritten(change: dict[str, Any], version: int = 1) -> bytes:
    """A manifest whose checksum is right and whose content is not."""
    body = json.loads(make_snapshot(3).encode())["snapshot"] | change
    raw = json.dumps([version, body], sort_keys=True, separators=(",", ":")).encode()
    whole = {"blake3": blake3(raw).hexdigest(), "format": version, "snapshot": body}
    return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [0, 1, 3]},
        {"token_ids": [0, 1, "2"]},
        {"frontier": 4},
        {"frontier": -1},
        {"chunks": []},
        {"chunks": ["zz"]},
        {"sequence": 0},
        {"name": "a\nb"},
        {"name": 3},
        {"context": None},
        {"context": {}},
        {"extra": 1},
    ],
)
def test_contradictions_are_damage_even_under_a_right_checksum(change: dict[str, Any]) -> None:
    with pytest.raises(SessionError) as refusal:
        Snapshot.decode(_rewritten(change), "here")
    assert refusal.value.reason in {Reason.SESSION_DAMAGED, Reason.SESSION_NAME_INVALID}


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"snapshot": 1}'])
def test_something_else_is_damage(raw: bytes) -> None:
    with pytest.raises(SessionError) as refusal:
        Snapshot.decode(raw, "here")
    assert refusal.value.reason is Reason.SESSION_DAMAGED


def test_a_newer_format_is_told_apart_from_damage() -> None:
    with pytest.raises(StoreError) as refusal:
        Snapshot.decode(_rewritten({}, version=SNAPSHOT_FORMAT + 1), "here")
    assert refusal.value.reason is Reason.STORE_FORMAT_NEWER


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": 0},
        {"frontier": 301},
        {"frontier": 299},
        {"chunks": ()},
        {"token_ids": tuple(range(1, 301))},
        {"context": make_context(namespace=Namespace("other"))},
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        replace(make_snapshot(), **changes)


@pytest.mark.parametrize("change", [{"created_unix": 2.0}, {"sequence": 2}, {"name": "other"}])
def test_a_consistent_change_under_a_right_checksum_is_another_snapshot(change: dict[str, Any]) -> None:
    """The checksum is against damage; it is the only thing that tells these apart."""
    assert Snapshot.decode(_rewritten(change), "here") == replace(make_snapshot(3), **change)
