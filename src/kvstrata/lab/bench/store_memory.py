"""Put and get of the tiers in memory, device arena and host tier, against plain copies of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from xxhash import xxh3_128_digest

from kvstrata.lab.bench.result import BenchRow, interleaved
from kvstrata.lab.bench.store_chunks import ChunkShape, copy_rows, random_rows
from kvstrata.lab.bench.store_rates import rate_row
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.eviction import make_policy
from kvstrata.store.host_cache import HostCache
from kvstrata.tiers.device import open_backing
from kvstrata.tiers.memory import Grant, HostBacking, MemoryArena

__all__ = ["bench_memory_tiers"]


def bench_memory_tiers(
    shapes: Sequence[ChunkShape], rounds: int, seed: int, progress: Callable[[str], None], sample_bytes: int = 64 << 20
) -> list[BenchRow]:
    """For every shape: the device's arena on a CPU, an arena of host memory, and the host tier with its checksums.

    One thread; `sample_bytes` of chunks go through in turn, so that source and destination come from memory and not
    from a cache of the processor. The host tier is held to a copy with the same checksums; its distance to a bare copy
    is a row without a goal.
    """
    rows: list[BenchRow] = []
    for shape in shapes:
        progress(f"memory, chunks of {shape.name}")
        chunks = max(2, sample_bytes // shape.nbytes)
        source = random_rows(shape, chunks, seed)
        slots, size = chunks * shape.layers, shape.layout.segment_bytes
        arenas: dict[str, MemoryArena] = {
            "device": MemoryArena(size, open_backing(size, slots, torch.device("cpu"))),
            "host_arena": MemoryArena(size, HostBacking(size, slots)),
        }
        for name, arena in arenas.items():
            rows += _Arena(arena, shape, source).rows(name, rounds)
            arena.close()
        rows += _HostTier(shape, chunks, source).rows(rounds)
    return rows


class _Arena:
    def __init__(self, arena: MemoryArena, shape: ChunkShape, source: list[list[memoryview]]) -> None:
        self._arena = arena
        self._shape = shape
        self._chunks = len(source)
        self._source = [rows for chunk in source for rows in chunk]
        self._target = [each for chunk in random_rows(shape, self._chunks, 1) for each in chunk]
        self._owners = [(number, layer) for number in range(self._chunks) for layer in range(shape.layers)]
        self._grants: list[Grant] = []

    def rows(self, name: str, rounds: int) -> list[BenchRow]:
        samples = interleaved(
            {"put": self._put, "get": self._get, "plain get": self._plain_get, "plain put": self._plain_put}, rounds
        )
        return [
            rate_row(f"{name}.{what}.{self._shape.name}", self._shape.nbytes, samples[what], samples[f"plain {what}"])
            for what in ("put", "get")
        ]

    def _put(self) -> float:
        arena, grants = self._arena, []
        start = time.perf_counter()
        for owner, rows in zip(self._owners, self._source, strict=True):
            grant = arena.reserve(owner)
            assert grant is not None
            copy_rows(arena.backing.writable(grant.slot), rows)
            arena.backing.flush(grant.slot)
            arena.publish(grant, owner)
            grants.append(grant)
        taken = time.perf_counter() - start
        self._grants = grants
        return taken / self._chunks

    def _get(self) -> float:
        arena = self._arena
        start = time.perf_counter()
        for owner, grant, target in zip(self._owners, self._grants, self._target, strict=True):
            arena.hold(grant, owner)
            copy_rows(target, arena.backing.readable(grant.slot))
            arena.let_go(grant)
        return (time.perf_counter() - start) / self._chunks

    def _plain_get(self) -> float:
        views = [self._arena.backing.readable(grant.slot) for grant in self._grants]
        start = time.perf_counter()
        for view, target in zip(views, self._target, strict=True):
            copy_rows(target, view)
        return (time.perf_counter() - start) / self._chunks

    def _plain_put(self) -> float:
        views = [self._arena.backing.writable(grant.slot) for grant in self._grants]
        start = time.perf_counter()
        for view, rows in zip(views, self._source, strict=True):
            copy_rows(view, rows)
        taken = time.perf_counter() - start
        for grant in reversed(self._grants):
            self._arena.release(grant)
        return taken / self._chunks


class _HostTier:
    """Demotion from the device's arena and loading back into other buffers."""

    def __init__(self, shape: ChunkShape, chunks: int, source: list[list[memoryview]]) -> None:
        size, slots = shape.layout.segment_bytes, chunks * shape.layers
        device = MemoryArena(size, open_backing(size, slots, torch.device("cpu")))
        self._shape = shape
        self._directory = Directory(device, shape.layers, MemoryArena(size, HostBacking(size, slots)))
        self._cache = HostCache(self._directory, make_policy("lru"))
        self._segments: list[tuple[ChunkRecord, int]] = []
        self._target = [each for chunk in random_rows(shape, chunks, 1) for each in chunk]
        self._chunks = chunks
        for number, chunk in enumerate(source):
            record = self._directory.acquire(shape.identity(number), on_file=True)
            for layer, rows in enumerate(chunk):
                grant = self._directory.reserve(record, layer)
                assert grant is not None
                copy_rows(device.backing.writable(grant.slot), rows)
                self._directory.publish(record, layer, grant)
                self._segments.append((record, layer))

    def rows(self, rounds: int) -> list[BenchRow]:
        samplers: dict[str, Callable[[], float]] = {
            "put": self._put,
            "get": self._get,
            "checked get": lambda: self._plain_get(checked=True),
            "bare get": lambda: self._plain_get(checked=False),
            "checked put": lambda: self._plain_put(checked=True),
            "bare put": lambda: self._plain_put(checked=False),
            "leave": self._leave,
        }
        samples = interleaved(samplers, rounds)
        rows, size = [], self._shape.nbytes
        for what in ("put", "get"):
            name = f"host.{what}.{self._shape.name}"
            rows.append(rate_row(name, size, samples[what], samples[f"checked {what}"]))
            rows.append(rate_row(f"{name}.to_bare", size, samples[what], samples[f"bare {what}"], goal=False))
        return rows

    def _put(self) -> float:
        start = time.perf_counter()
        for record, layer in self._segments:
            self._cache.demote(record, layer)
        return (time.perf_counter() - start) / self._chunks

    def _get(self) -> float:
        start = time.perf_counter()
        for (record, layer), target in zip(self._segments, self._target, strict=True):
            if self._cache.load(record, layer, [target]) is None:
                raise RuntimeError("a segment has left the host tier while it was measured")
        return (time.perf_counter() - start) / self._chunks

    def _plain_get(self, *, checked: bool) -> float:
        views = [self._host_view(record, layer) for record, layer in self._segments]
        wanted = [record.host.checksums[layer] for record, layer in self._segments]
        start = time.perf_counter()
        for view, target, checksum in zip(views, self._target, wanted, strict=True):
            copy_rows(target, view)
            if checked and xxh3_128_digest(target) != checksum:
                raise RuntimeError("a copy differs from its source")
        return (time.perf_counter() - start) / self._chunks

    def _plain_put(self, *, checked: bool) -> float:
        backing = self._directory.arena.backing
        sources = [backing.readable(_granted(record.grants[layer]).slot) for record, layer in self._segments]
        views = [self._host_view(record, layer) for record, layer in self._segments]
        start = time.perf_counter()
        for source, view in zip(sources, views, strict=True):
            checksum = xxh3_128_digest(source) if checked else b""
            copy_rows(view, source)
            if checked and xxh3_128_digest(view) != checksum:
                raise RuntimeError("a copy differs from its source")
        return (time.perf_counter() - start) / self._chunks

    def _leave(self) -> float:
        for record, layer in reversed(self._segments):
            self._directory.evict_host(record, layer)
        return 0.0

    def _host_view(self, record: ChunkRecord, layer: int) -> memoryview:
        return self._cache.arena.backing.writable(_granted(record.host.grants[layer]).slot)


def _granted(grant: Grant | None) -> Grant:
    if grant is None:
        raise RuntimeError("a segment has left its tier while it was measured")
    return grant
