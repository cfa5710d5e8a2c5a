"""The manifest of a paused conversation: what must hold for its rows to be used again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from kvstrata.contract.identity import ChunkContext, ChunkIdentity
from kvstrata.errors import ConfigurationError, Reason, SessionError, StoreError
from kvstrata.sessions.names import check_name

__all__ = ["SNAPSHOT_FORMAT", "Snapshot", "chunk_identities"]

SNAPSHOT_FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """One saved state of a session; immutable, and complete only together with its chunks.

    sequence: 1 for the first save of the name, then counting up. token_ids: the conversation, at least `frontier` long.
    frontier: rows `[0, frontier)` of all layers are in `chunks`. created_unix: seconds since 1970.

    Errors: `ConfigurationError` when the parts contradict each other, `SessionError` for an illegal name.
    """

    name: str
    sequence: int
    context: ChunkContext
    token_ids: tuple[int, ...]
    chunks: tuple[bytes, ...]
    frontier: int
    created_unix: float

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.sequence < 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"Snapshot.sequence={self.sequence} must be positive")
        if not 0 <= self.frontier <= len(self.token_ids):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"Snapshot.frontier={self.frontier} with {len(self.token_ids)} token ids"
            )
        expected = tuple(item.digest for item in chunk_identities(self.context, self.token_ids[: self.frontier]))
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
        return chunk_identities(self.context, self.token_ids[: self.frontier])

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
        outer = {"blake3": _checksum(SNAPSHOT_FORMAT, body), "format": SNAPSHOT_FORMAT, "snapshot": body}
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


def chunk_identities(context: ChunkContext, token_ids: Sequence[int]) -> tuple[ChunkIdentity, ...]:
    """Cut `token_ids` into chunks of `context.chunk_tokens`, the last perhaps shorter, each chained to its parent."""
    identities: list[ChunkIdentity] = []
    parent = b""
    for start in range(0, len(token_ids), context.chunk_tokens):
        identity = ChunkIdentity(context, parent, start, tuple(token_ids[start : start + context.chunk_tokens]))
        identities.append(identity)
        parent = identity.digest
    return tuple(identities)


def _checksum(version: object, body: dict[str, Any]) -> str:
    return blake3(_dump([version, body])).hexdigest()


def _dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
