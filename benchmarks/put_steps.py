"""Where the time of a put into the file tier goes: microseconds a chunk for each step, alone and put together.

    python benchmarks/put_steps.py --directory /tmp [--durable]

Everything is timed where the store calls it: SQLite through its connection, system calls through its file system. What
is left is the interpreter and, in memory, the hash of what was read back. Medians over `--rounds` rounds.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvstrata.lab.bench.store_chunks import SHAPES, ChunkShape, random_rows
from kvstrata.store import Store
from kvstrata.tiers.filesystem import OsFiles

STEPS = {
    "open": "create",
    "close": "create",
    "allocate": "allocate",
    "pwritev": "write",
    "preadv": "read back",
    "size": "read back",
    "link": "name",
    "unlink": "name",
    "makedirs": "name",
    "fdatasync": "sync file",
    "sync_directory": "sync directory",
}
SPENT: Counter[str] = Counter()


class TimedFiles:
    """`OsFiles`, each call noted under its step."""

    def __init__(self) -> None:
        self._files = OsFiles()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._files, name)

        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*arguments)
            finally:
                SPENT[STEPS.get(name, name)] += time.perf_counter() - start

        return call


class TimedConnection(sqlite3.Connection):
    """Statements and commits apart."""

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        return self._timed(super().execute, statement, *arguments)

    def executemany(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        return self._timed(super().executemany, statement, *arguments)

    def _timed(self, call: Any, statement: str, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(statement, *arguments)
        finally:
            step = "commit" if statement in ("COMMIT", "BEGIN IMMEDIATE") else "statements"
            SPENT[step] += time.perf_counter() - start


def connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(
        uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False, factory=TimedConnection
    )


def measure(store: Store, shape: ChunkShape, chunks: int, rounds: int, *, together: bool) -> dict[str, float]:
    sources = [[[each] for each in rows] for rows in random_rows(shape, chunks, 0)]
    samples: list[Counter[str]] = []
    for round_ in range(rounds + 5):
        first = 10_000 * (1 + together) + round_ * chunks
        batch = [(shape.identity(first + i), shape.layout, rows) for i, rows in enumerate(sources)]
        digests = [identity.digest for identity, _, _ in batch]
        SPENT.clear()
        start = time.perf_counter()
        receipts = store.file_tier.write_all(batch) if together else [store.file_tier.write(*each) for each in batch]
        taken = time.perf_counter() - start
        spent = Counter(SPENT)
        spent["hash source"] = sum(receipt.checksum_seconds for receipt in receipts)
        spent["rest"] = taken - sum(spent.values())
        spent["all"] = taken
        if round_ >= 5:
            samples.append(spent)
        store.evict(digests)
    names = sorted({name for sample in samples for name in sample}, key=lambda name: -samples[-1][name])
    return {name: 1e6 * statistics.median(sample[name] for sample in samples) / chunks for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--durable", action="store_true")
    options = parser.parse_args()
    for shape in SHAPES:
        chunks = min(16, max(2, (8 << 20) // shape.nbytes))
        for together in (False, True):
            with (
                tempfile.TemporaryDirectory(dir=options.directory) as folder,
                Store(Path(folder) / "store", durable=options.durable, files=TimedFiles(), connect=connect) as store,
            ):
                found = measure(store, shape, chunks, options.rounds, together=together)
            print(f"{shape.name}, {f'{chunks} together' if together else 'alone'}, us a chunk:")
            print("  " + ", ".join(f"{name} {value:.0f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
