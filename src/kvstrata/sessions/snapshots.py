"""The manifest of a paused conversation: what must hold for its rows to be used again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from kvstrata.contract.identity import EXACT, ChunkContext, ChunkIdentity
from kvstrata.errors import ConfigurationError, Reason, SessionError, StoreError
from kvstrata.sessions.names import check_name

__all__ = ["SNAPSHOT_FORMAT", "Snapshot", "chunk_identities"]

SNAPSHOT_FORMAT = 2
"""Newest format that is read. Snapshots of exact rows alone are written in format 1, which older versions read too."""


@dataclass(frozen=True)
class Snapshot:
    """One saved state of a session; immutable, and complete only together with its chunks.

    sequence: 1 for the first save of the name, then counting up. token_ids: the conversation, at least `frontier` long.
    frontier: rows `[0, frontier)` of all layers are in `chunks`. created_unix: seconds since 1970. approximate_from:
    the chunk boundary from which on rows have the lineage of `context`, where that is not the exact one; those before
    it are exact.

    Errors: `ConfigurationError` when the parts contradict each other, `SessionError` for an illegal name.
    """

    name: str
    sequence: int
    context: ChunkContext
    token_ids: tuple[int, ...]
    chunks: tuple[bytes, ...]
    frontier: int
    created_unix: float
    approximate_from: int | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.sequence < 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"Snapshot.sequence={self.sequence} must be positive")
        if not 0 <= self.frontier <= len(self.token_ids):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"Snapshot.frontier={self.frontier} with {len(self.token_ids)} token ids"
            )
        if (self.approximate_from is None) is not (self.context.lineage == EXACT):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"Snapshot.approximate_from={self.approximate_from} with rows of lineage {self.context.lineage!r}",
            )
        expected = tuple(item.digest for item in self.identities())
        if expected != self.chunks:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, "Snapshot.chunks are not the chunks of its context and token ids"
            )

    @property
    def tenant(self) -> str:
        """The tenant that owns the session."""
        return self.context.namespace.tenant

    def identities(self) -> tuple[ChunkIdentity, ...]:
        """The chunks in order of position, each with its parent and its token ids."""
        return chunk_identities(self.context, self.token_ids[: self.frontier], self.approximate_from or 0)

    def encode(self) -> bytes:
        """The only bytes that `decode` accepts for this snapshot."""
        body = {
            "chunks": [chunk.hex() for chunk in self.chunks],
            "context": self.context.to_json(),
            "created_unix": self.created_unix,
            "frontier": self.frontier,
            "name": self.name,
            "sequence": self.sequence,
            "token_ids": list(self.token_ids),
        }
        version = 1
        if self.approximate_from is not None:
            version, body["approximate_from"] = SNAPSHOT_FORMAT, self.approximate_from
        outer = {"blake3": _checksum(version, body), "format": version, "snapshot": body}
        return _dump(outer) + b"\n"

    @classmethod
    def decode(cls, raw: bytes, place: str) -> Snapshot:
        """Inverse of `encode`; `place` names the source in messages.

        Errors: `SessionError` with SESSION_DAMAGED; `StoreError` with STORE_FORMAT_NEWER.
        """
        try:
            outer: dict[str, Any] = json.loads(raw)
            body: dict[str, Any] = outer["snapshot"]
            if outer["blake3"] != _checksum(outer["format"], body):
                raise ValueError("its checksum is wrong")
            if outer["format"] > SNAPSHOT_FORMAT:
                raise StoreError(
                    Reason.STORE_FORMAT_NEWER,
                    f"{place} has format {outer['format']}; this version reads up to {SNAPSHOT_FORMAT}",
                    "upgrade kvstrata",
                )
            snapshot = cls(
                name=body["name"],
                sequence=body["sequence"],
                context=ChunkContext.from_json(body["context"]),
                token_ids=tuple(body["token_ids"]),
                chunks=tuple(bytes.fromhex(chunk) for chunk in body["chunks"]),
                frontier=body["frontier"],
                created_unix=body["created_unix"],
                approximate_from=body.get("approximate_from"),
            )
            if snapshot.encode() != raw:
                raise ValueError("it is not in canonical form")
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise SessionError(
                Reason.SESSION_DAMAGED,
                f"{place} is damaged: {error}",
                "load an earlier sequence of the session, or remove this one with `kvstrata store rm NAME`",
            ) from error
        return snapshot


def chunk_identities(
    context: ChunkContext, token_ids: Sequence[int], approximate_from: int = 0
) -> tuple[ChunkIdentity, ...]:
    """Cut `token_ids` into chunks of `context.chunk_tokens`, the last perhaps shorter, each chained to its parent.

    approximate_from: chunks that begin before it are exact, whatever the lineage of `context`.
    """
    identities: list[ChunkIdentity] = []
    exact, parent = replace(context, lineage=EXACT), b""
    for start in range(0, len(token_ids), context.chunk_tokens):
        own = exact if start < approximate_from else context
        identity = ChunkIdentity(own, parent, start, tuple(token_ids[start : start + context.chunk_tokens]))
        identities.append(identity)
        parent = identity.digest
    return tuple(identities)


def _checksum(version: object, body: dict[str, Any]) -> str:
    return blake3(_dump([version, body])).hexdigest()


def _dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
