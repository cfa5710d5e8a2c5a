"""The fresh process of the look-up benchmark: prints its figures as one line of JSON."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from kvstrata.lab.process_memory import release_free_memory, resident_bytes
from kvstrata.store import Lookup, Store

__all__ = ["main"]

_CONTEXT, _NAMESPACE, _TENANT = b"c" * 32, b"n" * 32, b"t" * 32


def main(chunks: int, tokens: int, asked: int, rounds: int, seed: int) -> None:
    """Fill a catalog, look every chunk up once, then `asked` of them at random, `rounds` times."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        Store(path).close()
        _fill(path, chunks, tokens)
        with Store(path) as store:
            assert store.catalog is not None
            store.catalog.mirror.limit_bytes = 1 << 62
            lookup = store.catalog.lookup
            lookup(b"x" * 32, _CONTEXT, _NAMESPACE, b"")
            release_free_memory()
            before, cold, hits = resident_bytes(), 0.0, 0
            for chunk, ids, generation in _entries(range(chunks), tokens):
                start = time.perf_counter()
                hits += lookup(chunk, _CONTEXT, _NAMESPACE, ids, generation) is Lookup.HIT
                cold += time.perf_counter() - start
            if hits != chunks:
                raise SystemExit(f"{chunks - hits} of {chunks} chunks were not found")
            after = resident_bytes()
            # Other objects than those that are remembered: no comparison ends at the identity.
            source = random.Random(seed)  # noqa: S311 - a choice of chunks, not a secret
            sample = list(_entries([source.randrange(chunks) for _ in range(asked)], tokens))
            rates = []
            for _ in range(rounds):
                start = time.perf_counter()
                for chunk, ids, generation in sample:
                    lookup(chunk, _CONTEXT, _NAMESPACE, ids, generation)
                rates.append(asked / (time.perf_counter() - start))
    figures = {
        "rates": rates,
        "cold_rate": chunks / cold,
        "cold_n": chunks,
        "entry_bytes": (after - before) / chunks - 4 * tokens if before and after else None,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def _entries(numbers: range | list[int], tokens: int) -> Iterator[tuple[bytes, bytes, int]]:
    """Name, packed token ids and generation of each chunk, made anew every time."""
    for number in numbers:
        made = blake3(number.to_bytes(8, "little")).digest(length=32 + 4 * tokens)
        yield made[:32], made[32:], number + 1


def _fill(path: Path, chunks: int, tokens: int) -> None:
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        database.execute("INSERT INTO contexts VALUES (1, ?, ?, ?)", (_CONTEXT, _NAMESPACE, _TENANT))
        database.executemany(
            "INSERT INTO chunks(digest, context, parent, start, tokens, layout, payload, file_bytes,"
            " replica_generation, state, created, last_used)"
            " VALUES (?, 1, x'', 0, ?, zeroblob(32), zeroblob(32), 1048576, ?, 'published', 0.0, 0.0)",
            _entries(range(chunks), tokens),
        )
        database.execute("COMMIT")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:6]))
