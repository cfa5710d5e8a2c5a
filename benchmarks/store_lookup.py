"""Look-ups a second in the catalog's mirror on one thread, and bytes for each entry, token ids apart.

    python benchmarks/store_lookup.py --chunks 1000000 --tokens 256

Rows are made up and put into the database directly; no chunk files are written. Every look-up compares digest, context,
namespace, replica generation and token ids.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import resource
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from kvstrata.contract.encoding import digest
from kvstrata.store import Lookup, Store


def fill(path: Path, chunks: int, tokens: int, seed: int) -> list[tuple[bytes, bytes, int]]:
    """Put `chunks` rows into the catalog of the store at `path`; returns digest, token ids and generation of each."""
    source = random.Random(seed)
    rows = [(digest("bench/1", number), source.randbytes(4 * tokens), number + 1) for number in range(chunks)]
    with contextlib.closing(sqlite3.connect(path / "catalog.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        database.execute("INSERT INTO contexts VALUES (1, ?, ?, ?)", (b"c" * 32, b"n" * 32, b"t" * 32))
        database.executemany(
            "INSERT INTO chunks(digest, context, parent, start, tokens, layout, payload, file_bytes,"
            " replica_generation, state, created, last_used)"
            " VALUES (?, 1, x'', 0, ?, zeroblob(32), zeroblob(32), 1048576, ?, 'published', 0.0, 0.0)",
            rows,
        )
        database.execute("COMMIT")
    return rows


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--lookups", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    source = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        Store(path).close()
        rows = fill(path, options.chunks, options.tokens, options.seed)
        opening = time.perf_counter()
        with Store(path) as store:
            opening = time.perf_counter() - opening
            assert store.catalog is not None
            mirror = store.catalog.mirror
            mirror.limit_bytes = 1 << 62
            lookup = store.catalog.lookup
            context, namespace = b"c" * 32, b"n" * 32
            before = resident()
            cold = time.perf_counter()
            hits = sum(lookup(c, context, namespace, ids, g) is Lookup.HIT for c, ids, g in rows)
            cold = time.perf_counter() - cold
            grown = resident() - before
            # Other objects than those that are remembered, in another order: no comparison ends at the identity.
            sample = [rows[source.randrange(len(rows))] for _ in range(options.lookups)]
            asked = [(bytes(bytearray(c)), bytes(bytearray(ids)), g) for c, ids, g in sample[:100_000]]
            warm, done = 0.0, 0
            while done < options.lookups:
                begin = time.perf_counter()
                for chunk, ids, generation in asked:
                    lookup(chunk, context, namespace, ids, generation)
                warm += time.perf_counter() - begin
                done += len(asked)
        result = {
            "chunks": options.chunks,
            "tokens": options.tokens,
            "seed": options.seed,
            "hits": hits,
            "lookups_per_s": round(done / warm),
            "first_lookups_per_s": round(options.chunks / cold),
            "bytes_per_entry": round(grown / options.chunks - 4 * options.tokens),
            "open_s": round(opening, 3),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        }
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
