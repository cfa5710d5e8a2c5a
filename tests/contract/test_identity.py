"""Every field that decides what rows mean changes the name of the chunk, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.identity import (
    CacheAbi,
    ChunkContext,
    ChunkIdentity,
    ModelIdentity,
    Namespace,
    PositionRule,
    ReplicaIdentity,
    first_difference,
)
from kvstrata.errors import ConfigurationError

BASE = ChunkContext(
    ModelIdentity("blake3:00", ("lora-a",), 1),
    CacheAbi(30, 9, 3, 64, "bfloat16"),
    PositionRule("llama3", 500000.0, (("factor", "8.0"),)),
    Namespace("alice", "salt"),
)
GOLDEN_CONTEXT = "fa65cdba960517f5ba5d500e611a9992289484fc93db06842977c108912ca156"
GOLDEN_CHUNK = "76d1155f1030603491448352b17bdb2ed281163093e8573d18b7aa990f23b9c7"

CHANGES: list[tuple[str, Callable[[ChunkContext], ChunkContext]]] = [
    ("model.artefact", lambda c: replace(c, model=replace(c.model, artefact="blake3:01"))),
    ("model.adapters", lambda c: replace(c, model=replace(c.model, adapters=()))),
    ("model.adapters", lambda c: replace(c, model=replace(c.model, adapters=("lora-a", "lora-b")))),
    ("model.weights_generation", lambda c: replace(c, model=replace(c.model, weights_generation=2))),
    ("abi.layers", lambda c: replace(c, abi=replace(c.abi, layers=31))),
    ("abi.query_heads", lambda c: replace(c, abi=replace(c.abi, query_heads=12))),
    ("abi.kv_heads", lambda c: replace(c, abi=replace(c.abi, kv_heads=9))),
    ("abi.head_dim", lambda c: replace(c, abi=replace(c.abi, head_dim=128))),
    ("abi.dtype", lambda c: replace(c, abi=replace(c.abi, dtype="float16"))),
    ("abi.representation", lambda c: replace(c, abi=replace(c.abi, representation="keys-before-rotary"))),
    ("position.rope_type", lambda c: replace(c, position=replace(c.position, rope_type="default"))),
    ("position.theta", lambda c: replace(c, position=replace(c.position, theta=10000.0))),
    ("position.parameters", lambda c: replace(c, position=replace(c.position, parameters=()))),
    ("namespace.tenant", lambda c: replace(c, namespace=replace(c.namespace, tenant="bob"))),
    ("namespace.salt", lambda c: replace(c, namespace=replace(c.namespace, salt=""))),
    ("lineage", lambda c: replace(c, lineage="approximate:1")),
    ("chunk_tokens", lambda c: replace(c, chunk_tokens=512)),
]


@pytest.mark.parametrize(("field", "change"), CHANGES)
def test_each_field_is_part_of_the_identity(field: str, change: Callable[[ChunkContext], ChunkContext]) -> None:
    other = change(BASE)
    assert other.digest != BASE.digest
    assert ChunkIdentity(other, b"", 0, (1,)).digest != ChunkIdentity(BASE, b"", 0, (1,)).digest
    difference = first_difference(BASE, other)
    assert difference is not None
    assert difference.field == field
    assert difference.stored in str(difference)


def test_equal_contexts_have_no_difference() -> None:
    assert first_difference(BASE, replace(BASE)) is None


def test_digests_are_the_same_on_every_machine() -> None:
    assert BASE.digest.hex() == GOLDEN_CONTEXT
    assert ChunkIdentity(BASE, b"\x07" * 32, 256, tuple(range(256))).digest.hex() == GOLDEN_CHUNK


def test_a_context_survives_json() -> None:
    restored = ChunkContext.from_json(json.loads(json.dumps(BASE.to_json())))
    assert restored == BASE
    assert restored.digest == BASE.digest


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
)
def test_chunks_share_a_name_only_with_the_same_tokens(left: list[int], right: list[int]) -> None:
    names = [ChunkIdentity(BASE, b"", 0, tuple(ids)).digest for ids in (left, right)]
    assert (names[0] == names[1]) == (left == right)


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_the_parent_is_part_of_the_name(left: bytes, right: bytes) -> None:
    names = [ChunkIdentity(BASE, parent, 256, (1, 2)).digest for parent in (left, right)]
    assert (names[0] == names[1]) == (left == right)


def test_the_position_is_part_of_the_name() -> None:
    parent = b"\x01" * 32
    assert ChunkIdentity(BASE, parent, 256, (1,)).digest != ChunkIdentity(BASE, parent, 512, (1,)).digest


@pytest.mark.parametrize(
    ("parent", "start", "ids"),
    [
        (b"", 0, ()),
        (b"", 0, tuple(range(257))),
        (b"", 256, (1,)),
        (b"x" * 32, 0, (1,)),
        (b"x" * 32, 100, (1,)),
        (b"", 0, (-1,)),
        (b"", 0, (2**32,)),
    ],
)
def test_impossible_chunks_are_refused(parent: bytes, start: int, ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        ChunkIdentity(BASE, parent, start, ids)


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="artefact"):
        ModelIdentity("")


REPLICA: dict[str, Any] = {
    "chunk": b"c",
    "tier": "file",
    "allocation_generation": 1,
    "replica_generation": 1,
    "authority_generation": 1,
    "codec": "none",
    "layout": "l",
    "payload": b"p",
}


@pytest.mark.parametrize("field", list(REPLICA))
def test_each_field_of_a_replica_changes_its_digest(field: str) -> None:
    value = REPLICA[field]
    changed = REPLICA | {field: value + 1 if isinstance(value, int) else value * 2}
    assert ReplicaIdentity(**changed).digest != ReplicaIdentity(**REPLICA).digest
