"""What a chunk of K/V history *is*: the semantic identity, apart from where its bytes lie.

A chunk is named by everything that decides what its rows mean (the `ChunkContext`: model, adapters, cache geometry,
position rule, tenant, lineage, chunk size), by its parent chunk and by its token ids. Replicas of the same chunk in
different tiers share this identity and differ in `ReplicaIdentity`.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvstrata.contract.encoding import digest
from kvstrata.errors import ConfigurationError, Reason

__all__ = [
    "EXACT",
    "CacheAbi",
    "ChunkContext",
    "ChunkIdentity",
    "FieldDifference",
    "ModelIdentity",
    "Namespace",
    "PositionRule",
    "ReplicaIdentity",
    "first_difference",
]

EXACT = "exact"
"""Lineage of rows computed under exact attention only."""

_MAX_TOKEN_ID = 2**32 - 1
_SECRET_FIELDS = frozenset({"namespace.salt"})


@dataclass(frozen=True)
class ModelIdentity:
    """Which weights produced the rows.

    artefact: digest of the artefact's bytes (`blake3:...`) or the caller's name for it (`id:...`).
    adapters: ordered names or digests of the adapters in force.
    weights_generation: counts in-place changes of the weights.
    """

    artefact: str
    adapters: tuple[str, ...] = ()
    weights_generation: int = 0

    def __post_init__(self) -> None:
        if not self.artefact:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, "ModelIdentity.artefact is empty")


@dataclass(frozen=True)
class CacheAbi:
    """Geometry and representation of the rows. `representation` says in which form keys are kept."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    representation: str = "keys-after-rotary"


@dataclass(frozen=True)
class PositionRule:
    """How positions enter the rows. `parameters` are the remaining rotary settings, sorted by name."""

    rope_type: str
    theta: float
    parameters: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Namespace:
    """Who may share the rows: nothing is ever found across tenants or salts."""

    tenant: str = "default"
    salt: str = ""


@dataclass(frozen=True)
class ChunkContext:
    """Everything that all chunks of one history have in common."""

    model: ModelIdentity
    abi: CacheAbi
    position: PositionRule
    namespace: Namespace = field(default_factory=Namespace)
    lineage: str = EXACT
    chunk_tokens: int = 256

    @cached_property
    def digest(self) -> bytes:
        """32-byte digest, equal in every process and on every machine."""
        return digest("chunk-context/1", self)

    @cached_property
    def encoded(self) -> str:
        """`to_json` as compact text with sorted keys, taken once: every chunk of a history carries it."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    def to_json(self) -> dict[str, Any]:
        """Plain values for headers and manifests; `from_json` restores an equal object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ChunkContext:
        """Inverse of `to_json`. Errors: KeyError, TypeError or ValueError for data of another shape."""
        model, position = data["model"], data["position"]
        if not all(isinstance(value, str) for value in data["namespace"].values()):
            raise TypeError("tenant and salt are texts")
        return cls(
            model=ModelIdentity(model["artefact"], tuple(model["adapters"]), model["weights_generation"]),
            abi=CacheAbi(**data["abi"]),
            position=PositionRule(
                position["rope_type"], float(position["theta"]), tuple((k, v) for k, v in position["parameters"])
            ),
            namespace=Namespace(**data["namespace"]),
            lineage=data["lineage"],
            chunk_tokens=data["chunk_tokens"],
        )


@dataclass(frozen=True)
class ChunkIdentity:
    """One sealed run of positions `[start, start + len(token_ids))` and all that came before it.

    parent: digest of the preceding chunk, or empty bytes for the first. A chunk shorter than `context.chunk_tokens` can
    only be the last of a snapshot.
    """

    context: ChunkContext
    parent: bytes
    start: int
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.token_ids) <= self.context.chunk_tokens:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"a chunk holds 1 to {self.context.chunk_tokens} tokens, not {len(self.token_ids)}",
            )
        if self.start % self.context.chunk_tokens:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"ChunkIdentity.start={self.start} is not a chunk boundary"
            )
        if (self.start == 0) != (self.parent == b""):
            raise ConfigurationError(Reason.INVALID_ARGUMENT, "only the chunk at position 0 has no parent")
        if min(self.token_ids) < 0 or max(self.token_ids) > _MAX_TOKEN_ID:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, "ChunkIdentity.token_ids must lie in [0, 2**32)")

    @cached_property
    def digest(self) -> bytes:
        """32-byte name of the chunk, equal in every process and on every machine."""
        ids = struct.pack(f"<{len(self.token_ids)}I", *self.token_ids)
        return digest("chunk/1", (self.context.digest, self.parent, self.start, ids))

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ReplicaIdentity:
    """The bytes of one chunk in one tier. A promotion changes this and leaves the chunk's identity alone."""

    chunk: bytes
    tier: str
    allocation_generation: int
    replica_generation: int
    authority_generation: int
    codec: str
    layout: str
    payload: bytes

    @cached_property
    def digest(self) -> bytes:
        """32-byte digest over all fields."""
        return digest("replica/1", self)


@dataclass(frozen=True)
class FieldDifference:
    """The first field in which two contexts differ, e.g. `position.theta`, with both values as text but for salts."""

    field: str
    stored: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.field}: stored {self.stored}, wanted {self.wanted}"


def first_difference(stored: object, wanted: object, path: str = "") -> FieldDifference | None:
    """Walk two dataclasses of the same type in field order; `None` when they are equal."""
    for item in dataclasses.fields(stored):  # type: ignore[arg-type]
        left, right = getattr(stored, item.name), getattr(wanted, item.name)
        name = f"{path}{item.name}"
        if dataclasses.is_dataclass(left):
            deeper = first_difference(left, right, f"{name}.")
            if deeper is not None:
                return deeper
        elif left != right:
            hidden = name in _SECRET_FIELDS
            return FieldDifference(name, "(hidden)" if hidden else repr(left), "(hidden)" if hidden else repr(right))
    return None
