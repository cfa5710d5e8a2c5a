"""Chunks of real bytes, and a file system that fails on purpose."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.contract.identity import CacheAbi, ChunkContext, ChunkIdentity, ModelIdentity, Namespace, PositionRule
from kvstrata.contract.layout import SegmentLayout
from kvstrata.sessions.snapshots import chunk_identities
from kvstrata.tiers.files import FileTier, OsFiles, payload_bytes

LAYERS = 3
LAYOUT = SegmentLayout(kv_heads=2, query_heads=4, head_dim=16, dtype="float32", chunk_tokens=128)


class Crash(BaseException):
    """The process ended here: nothing runs after it."""


@dataclass(frozen=True)
class Chunk:
    """A chunk with the bytes of its segments, as `FileTier.write` takes them."""

    identity: ChunkIdentity
    layout: SegmentLayout
    segments: list[list[memoryview]]

    @property
    def digest(self) -> bytes:
        return self.identity.digest

    @property
    def arguments(self) -> tuple[ChunkIdentity, SegmentLayout, list[list[memoryview]]]:
        return self.identity, self.layout, self.segments

    def payload(self, layer: int) -> bytes:
        return b"".join(bytes(buffer) for buffer in self.segments[layer])


class GatedFiles(OsFiles):
    """Writes wait until the test opens the gate; `waiting` is set by the first that does."""

    def __init__(self) -> None:
        self.gate, self.waiting = threading.Event(), threading.Event()

    def allocate(self, fd: int, length: int, /) -> None:
        self.waiting.set()
        assert self.gate.wait(60)
        super().allocate(fd, length)


class GatedReads(OsFiles):
    """Reads by other threads than the first fail, or wait, as the test says."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failure = 0
        self.waiting = threading.Event()

    def preadv(self, fd: int, buffers: Any, offset: int, /) -> int:
        if threading.current_thread() is not threading.main_thread():
            self.waiting.set()
            assert self.gate.wait(60)
            if self.failure:
                raise OSError(self.failure, os.strerror(self.failure))
        return os.preadv(fd, buffers, offset)


@dataclass
class FaultyFiles:
    """`OsFiles` that counts its calls and does to a chosen one what the test wants.

    plan: number of the call (from 0) to what happens instead: an `OSError` number, or "crash". named: the same for any
    call of that name. short: the most bytes that one read or write moves.
    """

    plan: dict[int, int | str] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)
    short: int | None = None
    calls: list[str] = field(default_factory=list)
    dead: bool = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(OsFiles(), name)

        def call(*arguments: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            event = self.plan.get(number, self.named.get(name))
            if self.dead or event == "crash":
                self.dead = True
                raise Crash
            if event is not None:
                raise OSError(event, os.strerror(int(event)))
            if self.short is not None and name in {"preadv", "pwritev"}:
                arguments = (arguments[0], self._cut(arguments[1]), arguments[2])
            return real(*arguments)

        return call

    def _cut(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        kept, room = [], self.short or 0
        for buffer in buffers:
            kept.append(buffer.cast("B")[:room])
            room -= kept[-1].nbytes
        return [buffer for buffer in kept if buffer.nbytes]


def make_context(**changes: Any) -> ChunkContext:
    """The context of the chunks that `make_chunk` makes, with the fields given changed."""
    parts: dict[str, Any] = {
        "model": ModelIdentity("id:test"),
        "abi": CacheAbi(LAYERS, LAYOUT.query_heads, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.dtype),
        "position": PositionRule("default", 10000.0),
        "namespace": Namespace("default"),
        "chunk_tokens": LAYOUT.chunk_tokens,
    }
    return ChunkContext(**(parts | changes))


def make_chunk(
    seed: int = 0,
    tokens: int = LAYOUT.chunk_tokens,
    parts: int = 1,
    layout: SegmentLayout = LAYOUT,
    identity: ChunkIdentity | None = None,
    **changes: Any,
) -> Chunk:
    """A chunk whose token ids and bytes depend on `seed`, in `parts` buffers a layer; `changes` go to its context."""
    source = random.Random(seed)
    if identity is None:
        ids = tuple(source.randrange(2**32) for _ in range(tokens))
        identity = ChunkIdentity(make_context(**changes), b"", 0, ids)
    length = payload_bytes(layout, len(identity.token_ids)) // parts
    segments = [[memoryview(source.randbytes(length)) for _ in range(parts)] for _ in range(LAYERS)]
    return Chunk(identity, layout, segments)


def make_history(context: ChunkContext, token_ids: Sequence[int], seed: int = 0) -> list[Chunk]:
    """The chunks of a conversation, in order."""
    return [make_chunk(seed + i, identity=item) for i, item in enumerate(chunk_identities(context, token_ids))]


def write_all(tier: FileTier, chunks: Sequence[Chunk]) -> list[bytes]:
    """Store `chunks`; returns their digests."""
    for chunk in chunks:
        tier.write(*chunk.arguments)
    return [chunk.digest for chunk in chunks]


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 1 << bit
    path.write_bytes(raw)


def tree(root: Path) -> dict[str, bytes]:
    """All files below `root` with their content, but for locks and the catalog, which opening alone changes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith(("lock", "catalog.")) and path.parent.name != "owners"
    }
