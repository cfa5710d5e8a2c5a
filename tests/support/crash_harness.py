"""Real processes that write to a store and are killed with SIGKILL, and what the next opener must find.

    python tests/support/crash_harness.py --kills 500 --seed 0

A writer tells over a pipe what it begins and what has returned. It dies at the n-th system call or SQL statement, or
whenever the parent's timer says. The parent forks, so that a kill costs milliseconds, and imports no PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunks_and_faults import Chunk, make_chunk, make_context, make_history

from kvstrata.errors import KvstrataError
from kvstrata.sessions.session_store import SessionStore
from kvstrata.sessions.snapshots import Snapshot
from kvstrata.store import Store
from kvstrata.store.catalog_database import connect_sqlite
from kvstrata.store.rebuild import chunk_files
from kvstrata.tiers.files import OsFiles

OWN, SHARED = 6, 4
"""Chunks that one writer writes and removes, and chunks that all writers write and nobody removes."""
POINT_OPERATIONS = 6
_TOKENS = (1, 70)


class Fuse:
    """Counts system calls and SQL statements, and ends the process without a word at the `limit`-th."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0

    def tick(self, *_: object) -> None:
        self.count += 1
        if self.count == self.limit:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(self, uri: str) -> sqlite3.Connection:
        connection = connect_sqlite(uri)
        connection.set_trace_callback(self.tick)
        return connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(OsFiles(), name)

        def call(*arguments: Any) -> Any:
            self.tick()
            result = real(*arguments)
            self.tick()
            return result

        return call


@dataclass
class Expected:
    """What has returned and what had only begun, over all writers of one store. Keys are (writer, number)."""

    done: dict[tuple[int, int], str] = field(default_factory=dict)
    begun: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    sessions: set[tuple[int, int]] = field(default_factory=set)

    def hear(self, line: str) -> None:
        when, what, writer, number = line.split()
        key = (int(writer), int(number))
        if what == "save":
            if when == "end":
                self.sessions.add(key)
        elif when == "begin":
            self.begun.setdefault(key, set()).add(what)
        else:
            self.done[key] = what
            self.begun[key] = set()

    def may_be_present(self, key: tuple[int, int]) -> set[bool]:
        last = self.done.get(key) == "write"
        return {last} | {operation == "write" for operation in self.begun.get(key, ())}

    def settle(self, key: tuple[int, int], present: bool) -> None:
        self.done[key] = "write" if present else "remove"
        self.begun[key] = set()


def chunk_of(key: tuple[int, int]) -> Chunk:
    """The chunk of that writer and number; the writer -1 stands for all."""
    return make_chunk(1000 * (key[0] + 1) + key[1], tokens=_TOKENS[key[1] % 2])


def write_and_die(
    path: Path, writer: int, seed: float, fuse: Fuse, operations: int, durable: bool, pipe: int, leave: bool
) -> None:
    """The body of a writer; returns only when its fuse did not blow. `leave`: without closing the store."""
    source = random.Random(seed)

    def say(*words: object) -> None:
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    store = Store(path, durable=durable, files=fuse, connect=fuse.connect)  # type: ignore[arg-type]
    sessions = SessionStore(store)
    for step in range(operations):
        operation = ("write", "write", "share", "save", "remove")[step if step < 5 else source.randrange(5)]
        number = source.randrange(OWN)
        if operation == "share":
            number = source.randrange(SHARED)
            say("begin", "write", -1, number)
            store.tier.write(*chunk_of((-1, number)).arguments)
            say("end", "write", -1, number)
        elif operation == "write":
            say("begin", "write", writer, number)
            store.tier.write(*chunk_of((writer, number)).arguments)
            say("end", "write", writer, number)
        elif operation == "remove":
            say("begin", "remove", writer, number)
            store.evict([chunk_of((writer, number)).digest])
            say("end", "remove", writer, number)
        else:
            ids = tuple(range(10_000 * (writer + 1), 10_000 * (writer + 1) + 130))
            history = make_history(make_context(), ids)
            for chunk in history:
                store.tier.write(*chunk.arguments)
            saved = sessions.save(f"chat {writer}", make_context(), ids, [chunk.digest for chunk in history], len(ids))
            say("end", "save", writer, saved.sequence)
    if not leave:
        store.close()


def fork_writer(*arguments: Any) -> tuple[int, int]:
    """Process id of a new writer and the pipe on which it talks."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        write_and_die(*arguments[:6], writing, arguments[6])
        status = 0
    except BaseException as error:  # noqa: BLE001 - the parent counts it
        os.write(writing, f"error {type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
    finally:
        os._exit(status)


def count_points(path: Path, seed: float) -> int:
    """System calls and statements of a writer that nobody kills."""
    reading, writing = os.pipe()
    if not os.fork():
        fuse = Fuse(0)
        quiet = os.open(os.devnull, os.O_WRONLY)
        write_and_die(path, 0, seed, fuse, POINT_OPERATIONS, False, quiet, False)
        os.write(writing, str(fuse.count).encode())
        os._exit(0)
    os.wait()
    os.close(writing)
    with os.fdopen(reading) as answer:
        return int(answer.read())


def examine(path: Path, expected: Expected, writers: int, tally: Counter[str], problems: list[str]) -> None:
    """Open the store as the next process would, and compare it with what the dead had been told."""
    with Store(path) as store:
        catalog = store.catalog
        assert catalog is not None
        tally["recovered_intents"] += catalog.recovered.intents
        tally["recovered_deletions"] += catalog.recovered.deletions
        tally["dead_processes"] += catalog.recovered.dead_processes
        tally["rebuilt"] += catalog.rebuilt
        published = set(store.tier.list())
        for key in itertools.chain(
            itertools.product(range(writers), range(OWN)), itertools.product((-1,), range(SHARED))
        ):
            chunk = chunk_of(key)
            present = store.tier.has(chunk.digest)
            legal = expected.may_be_present(key)
            if present not in legal:
                tally["resurrected" if present else "lost"] += 1
                problems.append(f"chunk {key} is {'there' if present else 'gone'}; may be {legal}")
            expected.settle(key, present)
        for digest in published:
            with store.tier.open(digest) as file:
                file.verify_payload()
                tally["chunks_verified"] += 1
        sessions = SessionStore(store)
        for writer, sequence in expected.sessions:
            snapshot = sessions.load(f"chat {writer}", sequence=sequence)
            tally["lost"] += not all(store.tier.has(chunk) for chunk in snapshot.chunks)
        for _, _, content in sessions.snapshots():
            tally["torn"] += not isinstance(content, Snapshot)
            if isinstance(content, Snapshot) and store.evict(content.chunks).removed:
                tally["lost"] += 1
                problems.append(f"chunks of {content.name} were not pinned")
        orphans = {digest for digest, _ in chunk_files(path)} - published
        figures, usage = catalog.figures(), store.usage()
        for name, count in (
            ("orphan files", len(orphans)),
            ("temporaries", usage.temporary),
            ("reserved bytes", figures.reserved_bytes),
            ("bytes counted wrongly", figures.used_bytes - usage.total_bytes),
            ("damaged files", usage.damaged),
        ):
            if count:
                tally["left_over"] += 1
                problems.append(f"{count} {name}")


def run(kills: int, seed: int, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Kill until `kills` writers are dead. Two of three die at a point of the list of all points of a writer's life, in
    a random order, the others at a random time; in every third round two more writers share the store and live on."""
    source = random.Random(seed)
    tally: Counter[str] = Counter()
    problems: list[str] = []
    points: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        total = count_points(Path(folder) / "count", source.random())
        for number in itertools.count():
            if tally["kills"] >= kills:
                break
            if number % 12 == 0:
                path, expected, epoch = Path(folder) / f"store {number}", Expected(), 0
            writers = 3 if number % 3 == 2 else 1
            timed = number % 9 in {1, 5, 8}
            durable = number % 7 == 0
            operations = 12 if timed else POINT_OPERATIONS
            if timed:
                limit = 0
            else:
                points = points or source.sample(range(1, total + 1), total)
                limit = points.pop()
            began = [
                fork_writer(path, w, source.random(), Fuse(0 if w else limit), operations, durable, w == 1)
                for w in range(writers)
            ]
            if timed:
                time.sleep(source.uniform(0.0, 0.06))
                os.kill(began[0][0], signal.SIGKILL)
            before = len(problems)
            killed = os.WIFSIGNALED(os.waitpid(began[0][0], 0)[1])
            tally["kills"] += killed
            tally["kills_at_a_point" if not timed else "kills_at_a_time"] += killed
            if writers > 1:
                tally["kills_beside_live_writers"] += killed
                with Store(path) as beside:
                    assert beside.catalog is not None
            for pid, pipe in began:
                if pid != began[0][0]:
                    os.waitpid(pid, 0)
                with os.fdopen(pipe) as lines:
                    for line in lines:
                        if line.startswith("error"):
                            tally["errors"] += 1
                            problems.append(line.strip())
                        elif line.endswith("\n"):
                            expected.hear(line)
            try:
                examine(path, expected, 3, tally, problems)
            except KvstrataError as error:
                tally["torn"] += 1
                problems.append(f"{type(error).__name__}: {error.cause}")
            with Store(path) as store:
                assert store.catalog is not None
                now = store.catalog.figures().epoch
                if now < epoch:
                    problems.append(f"the epoch went from {epoch} to {now}")
                epoch = now
            problems[before:] = [f"round {number}, limit {limit}: {item}" for item in problems[before:]]
            progress(tally["kills"], kills)
    zero = {name: tally[name] for name in ("torn", "resurrected", "lost", "left_over", "errors")}
    return {
        "seed": seed,
        "points": total,
        **zero,
        **{k: v for k, v in sorted(tally.items()) if k not in zero},
        "problems": problems[:20],
    }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done} of {total} kills")

    result = run(arguments.kills, arguments.seed, progress)
    print(json.dumps(result, indent=2))
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
