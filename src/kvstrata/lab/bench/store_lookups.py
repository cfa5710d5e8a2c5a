"""Look-ups of the catalog's mirror on one thread, and what an entry takes. Rows are made up; no chunk files exist."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from kvstrata.contract.encoding import digest
from kvstrata.lab.bench.result import BenchRow, median_interval
from kvstrata.lab.process_memory import resident_bytes
from kvstrata.store import Lookup, Store
from kvstrata.store.catalog_database import CATALOG_NAME

__all__ = ["lookup_rows"]

_TOKENS = 64
_ASKED = 100_000
_RATE_GOAL = 200_000
_BYTES_GOAL = 500
_CONTEXT, _NAMESPACE, _TENANT = b"c" * 32, b"n" * 32, b"t" * 32


def lookup_rows(path: Path, chunks: int, seed: int) -> list[BenchRow]:
    """Fill a catalog of `chunks` rows below `path` and look them up: digest, context, tenant's namespace, replica
    generation and token ids are compared each time."""
    Store(path).close()
    rows = list(_made_up(path, chunks, seed))
    with Store(path) as store:
        assert store.catalog is not None
        store.catalog.mirror.limit_bytes = 1 << 62
        lookup = store.catalog.lookup
        before, start = resident_bytes() or 0, time.perf_counter()
        hits = sum(lookup(c, _CONTEXT, _NAMESPACE, ids, g) is Lookup.HIT for c, ids, g in rows)
        first = time.perf_counter() - start
        grown = (resident_bytes() or 0) - before
        assert hits == chunks
        source = random.Random(seed)  # noqa: S311 - a sample, not a secret
        # Other objects than those that are remembered: no comparison ends at the identity.
        sample = [rows[source.randrange(chunks)] for _ in range(_ASKED)]
        asked = [(bytes(bytearray(c)), bytes(bytearray(ids)), g) for c, ids, g in sample]
        rates = []
        for _ in range(9):
            start = time.perf_counter()
            for chunk, ids, generation in asked:
                lookup(chunk, _CONTEXT, _NAMESPACE, ids, generation)
            rates.append(len(asked) / (time.perf_counter() - start))
    rate = median_interval(rates)
    entry = grown / chunks - 4 * _TOKENS
    name = f"store.{chunks}"
    return [
        BenchRow(
            f"{name}.lookups",
            rate.median,
            "1/s",
            _RATE_GOAL,
            rate.median / _RATE_GOAL,
            f">= {_RATE_GOAL} look-ups/s on one thread",
            rate.median >= _RATE_GOAL,
            rate.n,
            rate.low / _RATE_GOAL,
            rate.high / _RATE_GOAL,
        ),
        BenchRow(f"{name}.first_lookups", chunks / first, "1/s", n=1),
        BenchRow(
            f"{name}.entry",
            entry,
            "B",
            _BYTES_GOAL,
            entry / _BYTES_GOAL,
            f"<= {_BYTES_GOAL} bytes an entry, token ids apart",
            entry <= _BYTES_GOAL,
        ),
    ]


def _made_up(path: Path, chunks: int, seed: int) -> Iterator[tuple[bytes, bytes, int]]:
    source = random.Random(seed)  # noqa: S311 - filler, not a secret
    rows = [(digest("bench/1", number), source.randbytes(4 * _TOKENS), number + 1) for number in range(chunks)]
    with contextlib.closing(sqlite3.connect(path / CATALOG_NAME, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        database.execute("INSERT INTO contexts VALUES (1, ?, ?, ?)", (_CONTEXT, _NAMESPACE, _TENANT))
        database.executemany(
            "INSERT INTO chunks(digest, context, parent, start, tokens, layout, payload, file_bytes,"
            " replica_generation, state, created, last_used)"
            " VALUES (?, 1, x'', 0, ?, zeroblob(32), zeroblob(32), 1048576, ?, 'published', 0.0, 0.0)",
            rows,
        )
        database.execute("COMMIT")
    return iter(rows)
