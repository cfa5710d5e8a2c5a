"""Put and get of the file tier, catalog included, against plain files with the same checksums."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.lab.bench.plain_files import PlainFiles
from kvstrata.lab.bench.result import BenchRow, interleaved
from kvstrata.lab.bench.store_chunks import SHAPES, ChunkShape, random_rows
from kvstrata.lab.bench.store_rates import rate_row
from kvstrata.store import Store
from kvstrata.tiers.files import ChunkRows

__all__ = ["bench_files"]

_SAMPLE_BYTES = 8 << 20
_SAMPLE_CHUNKS = 16
_DURABLE_CHUNKS = 4


def bench_files(
    shapes: Sequence[ChunkShape], rounds: int, seed: int, progress: Callable[[str], None]
) -> list[BenchRow]:
    """For every shape, not durable and durable: put against a plain file with and without reading back, get against a
    plain file, from a chunk that is opened for it and from one that is open.

    One thread, files in the page cache, the same source and destination buffers for all. Every put is of a chunk that
    is not there; removals are not timed. Put together: the same number of chunks, 8 MiB or at most 16, in one call;
    plain files share one sync of their directory then. Every directory of the store has been used before.
    """
    rows: list[BenchRow] = []
    for durable in (False, True):
        for shape in shapes:
            progress(f"files{', durable' if durable else ''}, chunks of {shape.name}")
            with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "store", durable=durable) as store:
                bench = _Files(store, Path(folder), shape, seed)
                rows += bench.rows(rounds)
    return rows


class _Files:
    def __init__(self, store: Store, folder: Path, shape: ChunkShape, seed: int) -> None:
        durable = store.tier.durable
        limit = _DURABLE_CHUNKS if durable else _SAMPLE_CHUNKS
        self._chunks = min(limit, max(2, _SAMPLE_BYTES // shape.nbytes))
        self._store = store
        self._shape = shape
        self._source = random_rows(shape, self._chunks, seed)
        self._target = random_rows(shape, 1, seed)[0]
        self._plain = PlainFiles(folder / "plain", durable=durable, read_back=False)
        self._read_back = PlainFiles(folder / "read-back", durable=durable, read_back=True)
        self._number = 0
        _use_every_shard(store)
        for number, rows in enumerate(self._source):
            self._plain.put({f"kept-{number}": rows})
        self._kept = [shape.identity(1_000_000 + number) for number in range(self._chunks)]
        for identity, rows in zip(self._kept, self._source, strict=True):
            store.tier.write(identity, shape.layout, [[each] for each in rows])

    def rows(self, rounds: int) -> list[BenchRow]:
        samples = interleaved(
            {
                "put": self._put,
                "put together": self._put_together,
                "plain, read back": lambda: self._put_plain(self._read_back),
                "plain together": lambda: self._put_plain(self._read_back, together=True),
                "plain": lambda: self._put_plain(self._plain),
            },
            rounds,
        )
        name = f"files{'.durable' if self._store.tier.durable else ''}"
        rows = [
            rate_row(f"{name}.put.{self._shape.name}", self._shape.nbytes, samples["put"], samples["plain, read back"]),
            rate_row(
                f"{name}.put_together.{self._shape.name}",
                self._shape.nbytes,
                samples["put together"],
                samples["plain together"],
            ),
            rate_row(
                f"{name}.put.{self._shape.name}.to_unread",
                self._shape.nbytes,
                samples["put"],
                samples["plain"],
                goal=False,
            ),
        ]
        if not self._store.tier.durable:
            samples = interleaved({"get": self._get, "plain": self._get_plain, "get open": self._get_open}, rounds)
            size = self._shape.nbytes
            rows += [
                rate_row(f"{name}.get.{self._shape.name}", size, samples["get"], samples["plain"]),
                rate_row(f"{name}.get_open.{self._shape.name}", size, samples["get open"], samples["plain"]),
            ]
        return rows

    def _put(self) -> float:
        chunks = self._new_chunks()
        start = time.perf_counter()
        for chunk in chunks:
            self._store.tier.write(*chunk)
        taken = time.perf_counter() - start
        self._store.evict([identity.digest for identity, _, _ in chunks])
        return taken / self._chunks

    def _put_together(self) -> float:
        chunks = self._new_chunks()
        start = time.perf_counter()
        self._store.file_tier.write_all(chunks)
        taken = time.perf_counter() - start
        self._store.evict([identity.digest for identity, _, _ in chunks])
        return taken / self._chunks

    def _new_chunks(self) -> list[ChunkRows]:
        identities = [self._shape.identity(self._number + number) for number in range(self._chunks)]
        self._number += self._chunks
        segments = [[[each] for each in rows] for rows in self._source]
        return [(each, self._shape.layout, rows) for each, rows in zip(identities, segments, strict=True)]

    def _put_plain(self, files: PlainFiles, *, together: bool = False) -> float:
        named = {str(number): rows for number, rows in enumerate(self._source)}
        start = time.perf_counter()
        for each in [named] if together else [{name: rows} for name, rows in named.items()]:
            files.put(each)
        taken = time.perf_counter() - start
        for number in range(self._chunks):
            files.remove(str(number))
        return taken / self._chunks

    def _get(self) -> float:
        buffers = [[each] for each in self._target]
        start = time.perf_counter()
        for identity in self._kept:
            with self._store.tier.open(identity.digest) as chunk:
                for layer, buffer in enumerate(buffers):
                    chunk.read_into(layer, buffer)
        return (time.perf_counter() - start) / self._chunks

    def _get_open(self) -> float:
        buffers = [[each] for each in self._target]
        chunks = [self._store.tier.open(identity.digest) for identity in self._kept]
        start = time.perf_counter()
        for chunk in chunks:
            for layer, buffer in enumerate(buffers):
                chunk.read_into(layer, buffer)
        taken = time.perf_counter() - start
        for chunk in chunks:
            chunk.close()
        return taken / self._chunks

    def _get_plain(self) -> float:
        start = time.perf_counter()
        for number in range(self._chunks):
            self._plain.get(f"kept-{number}", self._target)
        return (time.perf_counter() - start) / self._chunks


def _use_every_shard(store: Store) -> None:
    """A store makes its 256 directories when it first needs them, which says nothing about a store in use."""
    shape, unused, number = SHAPES[0], set(range(256)), 2_000_000
    rows = [[each] for each in random_rows(shape, 1, 0)[0]]
    used = []
    while unused:
        identity = shape.identity(number)
        number += 1
        if identity.digest[0] in unused:
            unused.remove(identity.digest[0])
            store.tier.write(identity, shape.layout, rows)
            used.append(identity.digest)
    store.evict(used)
