"""Puts and gets of each tier, beside a plain copy or a plain file with the same checksums, interleaved in one run."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3
from xxhash import xxh3_128_digest

from kvstrata.lab.bench.result import BenchRow, interleaved, median_interval
from kvstrata.lab.bench.store_chunks import make_identity, make_layout, make_segments
from kvstrata.store import Store
from kvstrata.store.directory import Directory
from kvstrata.store.eviction import Lru
from kvstrata.store.host_cache import HostCache
from kvstrata.tiers.memory import HostBacking, MemoryArena

__all__ = ["tier_rows"]

_LAYERS = 4
_GOAL = 0.85


def tier_rows(path: Path, size: int, rounds: int) -> list[BenchRow]:
    """Rows for chunks of `size` payload bytes in four layers, files below `path`."""
    return [
        *_memory_rows(size, rounds),
        *_file_rows(path, size, rounds, durable=False),
        *_file_rows(path.with_name(path.name + "-durable"), size, rounds, durable=True),
    ]


def _row(name: str, ours: Sequence[float], plain: Sequence[float], goal: bool = True) -> BenchRow:
    """Speed as a share of the plain way's, pair by pair."""
    value, baseline = median_interval(ours), median_interval(plain)
    share = median_interval([b / a for a, b in zip(ours, plain, strict=True)])
    met = share.median >= _GOAL if goal else None
    words = f">= {_GOAL} of the plain way's speed" if goal else ""
    return BenchRow(
        name, value.median * 1e6, "us", baseline.median * 1e6, share.median, words, met, share.n, share.low, share.high
    )


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def _memory_rows(size: int, rounds: int) -> list[BenchRow]:
    layout = make_layout(size // _LAYERS)
    segment = layout.segment_bytes
    source, out = np.frombuffer(os.urandom(segment), np.uint8), np.empty(segment, np.uint8)
    arena, host = (MemoryArena(segment, HostBacking(segment, 2 * _LAYERS)) for _ in range(2))
    spare = np.empty(segment, np.uint8)
    directory = Directory(arena, _LAYERS, host)
    cache = HostCache(directory, Lru())
    record = directory.acquire(make_identity(layout, _LAYERS, 0))
    for layer in range(_LAYERS):
        grant = directory.reserve(record, layer)
        assert grant is not None
        directory.publish(record, layer, grant)
        arena.backing.writable(grant.slot)[:] = source.data
    held = record.grants[0]
    assert held is not None
    resident = np.frombuffer(arena.backing.readable(held.slot), np.uint8)

    def put_device() -> None:
        grant = arena.reserve("bench")
        assert grant is not None
        np.copyto(np.frombuffer(arena.backing.writable(grant.slot), np.uint8), source)
        arena.publish(grant, "bench")
        arena.release(grant)

    def get_device() -> None:
        arena.hold(held, record.key(0))
        np.copyto(out, np.frombuffer(arena.backing.readable(held.slot), np.uint8))
        arena.let_go(held)

    def put_host() -> None:
        cache.demote(record, 0)

    def checked_copy(times: int) -> Callable[[], None]:
        def run() -> None:
            np.copyto(spare, resident)
            for _ in range(times):
                xxh3_128_digest(spare.data)

        return run

    def timed_put_host() -> float:
        if record.host.grants[0] is not None:
            directory.revoke_host(record, 0)
        return _timed(put_host)()

    name = f"store.{size}"
    found = interleaved(
        {
            "put": _timed(put_device),
            "plain_put": _timed(lambda: np.copyto(spare, source)),
            "get": _timed(get_device),
            "plain_get": _timed(lambda: np.copyto(out, resident)),
            "host_put": timed_put_host,
            "plain_host_put": _timed(checked_copy(2)),
            "host_get": _timed(lambda: cache.load(record, 0, [out.data])),
            "plain_host_get": _timed(checked_copy(1)),
        },
        4 * rounds,
    )
    return [
        _row(
            f"{name}.device.{way}" if not tier else f"{name}.host.{way}", found[tier + way], found[f"plain_{tier}{way}"]
        )
        for tier in ("", "host_")
        for way in ("put", "get")
    ]


def _file_rows(path: Path, size: int, rounds: int, *, durable: bool) -> list[BenchRow]:
    layout = make_layout(size // _LAYERS)
    segments = make_segments(layout, _LAYERS)
    numbers = itertools.count()
    plain = path.with_name(path.name + "-plain")
    plain.mkdir(parents=True)
    scratch = memoryview(bytearray(layout.segment_bytes))
    key = bytes(32)

    def put_plain(validate: bool) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            keyed = blake3(key=key)
            sums = [xxh3_128_digest(each[0]) for each in segments]
            for each in segments:
                keyed.update(each[0])
            header = b"".join(sums) + keyed.digest()
            temporary, final = plain / "temporary", plain / f"{next(numbers)}"
            fd = os.open(temporary, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
            os.posix_fallocate(fd, 0, 4096 + size)
            os.pwritev(fd, [header], 0)
            for layer, each in enumerate(segments):
                os.pwritev(fd, each, 4096 + layer * layout.segment_bytes)
            if durable:
                os.fdatasync(fd)
            for layer in range(_LAYERS if validate else 0):
                os.preadv(fd, [scratch], 4096 + layer * layout.segment_bytes)
                xxh3_128_digest(scratch)
            os.close(fd)
            temporary.rename(final)
            if durable:
                folder = os.open(plain, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
            taken = time.perf_counter() - start
            final.unlink()
            return taken

        return run

    with Store(path, durable=durable) as store:
        tier = store.file_tier

        def put() -> float:
            identity = make_identity(layout, _LAYERS, next(numbers))
            assert identity.digest
            start = time.perf_counter()
            tier.write(identity, layout, segments)
            taken = time.perf_counter() - start
            store.evict([identity.digest])
            return taken

        kept = make_identity(layout, _LAYERS, next(numbers))
        tier.write(kept, layout, segments)
        fd = os.open(tier.path(kept.digest), os.O_RDONLY)
        with tier.open(kept.digest) as file:
            offsets = [entry.offset for entry in file.header.segments]

            def get() -> None:
                for layer in range(_LAYERS):
                    file.read_into(layer, [scratch])

            def get_plain() -> None:
                for offset in offsets:
                    os.preadv(fd, [scratch], offset)
                    xxh3_128_digest(scratch)

            found = interleaved(
                {
                    "put": put,
                    "plain_put": put_plain(validate=False),
                    "validated_put": put_plain(validate=True),
                    "get": _timed(get),
                    "plain_get": _timed(get_plain),
                },
                rounds,
            )
        os.close(fd)
    name = f"store.{size}.files{'.durable' if durable else ''}"
    rows = [
        _row(f"{name}.put", found["put"], found["validated_put"]),
        _row(f"{name}.put_against_no_reading_back", found["put"], found["plain_put"], goal=False),
    ]
    return rows if durable else [*rows, _row(f"{name}.get", found["get"], found["plain_get"])]
