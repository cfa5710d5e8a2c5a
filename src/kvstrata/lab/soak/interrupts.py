"""Ctrl-C before any line of the store, and what is done about it: settle, and take back what nobody noted."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvstrata.errors import StateError, StoreError
from kvstrata.lab.soak.endings import take_back
from kvstrata.lab.soak.histories import note_sealed, put_rows
from kvstrata.lab.soak.reference import Line, require
from kvstrata.lab.soak.rows import SIZE
from kvstrata.lab.soak.settlement import settle
from kvstrata.lab.soak.world import World

__all__ = ["ACTIONS", "interrupt"]

_TRACED = ("/store/", "/tiers/memory.py", "/tiers/faulty.py")
_LINES = 120


def interrupt(call: Callable[[], object], line: int) -> bool:
    """Run `call` with a KeyboardInterrupt before the `line`th line that it runs in the store; whether it came."""
    passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        name = frame.f_code.co_filename
        if not any(part in name for part in _TRACED):
            return None
        # Python serves no signal between the end of a `with` body and the release of its lock, but traces a line there.
        locking = linecache.getline(name, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not locking:
            passed += 1
            if passed == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def _cut_short(world: World, call: Callable[[], object]) -> bool:
    came = interrupt(call, world.rng.randint(1, _LINES))
    if came:
        take_back(world, list(world.flights))
    return came


def commit(world: World, line: Line) -> str:
    """Rows are written; the commit is interrupted, and finished by whoever comes next."""
    rows, history = world.rng.randint(1, SIZE + 2), line.history
    if history.frontier + rows > 5 * SIZE or not history.extend_tail(rows):
        return "full"
    before = history.frontier
    tokens = put_rows(world, line, rows)
    came = _cut_short(world, lambda: history.commit(rows, tokens))
    history.settle()
    require(
        history.frontier in (before, before + rows), "an interrupted commit moved the frontier to", history.frontier
    )
    del line.tokens[history.frontier :], line.states[history.frontier :]
    note_sealed(world, line)
    return "cut" if came else "done"


def extend(world: World, line: Line) -> str:
    """Slots are being reserved for rows."""
    rows = world.rng.randint(1, SIZE)
    if line.history.frontier + rows > 5 * SIZE:
        return "full"
    came = _cut_short(world, lambda: line.history.extend_tail(rows))
    return "cut" if came else "done"


def rewind(world: World, line: Line) -> str:
    """Rows are being taken back."""
    history, before = line.history, line.history.frontier
    position = world.rng.choice([history.sealed, history.frontier // SIZE * SIZE, 0])
    came = _cut_short(world, lambda: history.rewind(position))
    history.settle()
    require(history.frontier in (before, position), "an interrupted cut moved the frontier to", history.frontier)
    del line.tokens[history.frontier :], line.states[history.frontier :]
    note_sealed(world, line)
    return "cut" if came else "done"


def close(world: World, line: Line) -> str:
    """A request is being closed, and is closed again."""
    came = _cut_short(world, line.history.close)
    world.lines.remove(line)
    line.history.close()
    return "cut" if came else "done"


def promote(world: World, _: Line) -> str:
    """Promotions are being reserved and started; nobody will finish them."""
    away = [(r, at) for r in world.directory for at in range(2) if r.residency[at] == "device_released"]

    def call() -> None:
        promotions = world.promoter.reserve(away[:3])
        if promotions:
            world.promoter.start(promotions)

    try:
        came = interrupt(call, world.rng.randint(1, _LINES))
    except StoreError:
        came = False
    take_back(world, list(world.flights))
    return "cut" if came else "done"


def finish(world: World, _: Line) -> str:
    """A step is waiting for its promotions, and waits again."""
    ended = [each for each in world.awaited if each.passage.phase == "landed" and each.outcome is None]
    if not ended:
        return "idle"
    batch = world.rng.choice(ended).batch
    assert batch is not None
    try:
        came = _cut_short(world, batch.finish)
        if came:
            batch.finish()
    except (StoreError, StateError):
        came = False
    settle(world)
    return "cut" if came else "done"


def complete(world: World, _: Line) -> str:
    """A completion is being taken, and comes again if it was not noted."""
    due = [entry for entry in world.due if entry[1].phase == "copying"]
    if not due:
        return "idle"
    when, passage, event = world.rng.choice(due)
    came = interrupt(lambda: passage.queue.complete(event), world.rng.randint(1, _LINES))
    if came:
        passage.queue.reclaim({flight.waiter for flight in world.flights})
    if passage.generation not in passage.queue.book.copying:
        world.due.remove((when, passage, event))
        passage.phase, passage.landed_at = "landed", world.clock.now
        passage.interrupted = came
    take_back(world, list(world.flights))
    return "cut" if came else "done"


def move_copy(world: World, _: Line) -> str:
    """A segment is being copied down, or leaves."""
    there = [
        (r, at) for r in world.directory for at in range(2) if r.residency[at] in ("device_visible", "lower_valid")
    ]
    if not there:
        return "idle"
    record, layer = world.rng.choice(there)
    down = world.rng.random() < 0.6
    call = world.cache.demote if down else world.directory.evict
    try:
        came = _cut_short(world, lambda: call(record, layer))
    except StateError:
        came = False
    return "cut" if came else "done"


_PARTS = (commit, commit, extend, rewind, close, promote, finish, finish, complete, complete, move_copy, move_copy)


def interrupted(world: World) -> str:
    """One of the above, with Ctrl-C somewhere in it."""
    if not world.lines:
        return "idle"
    part, meanwhile = world.rng.choice(_PARTS), world.meanwhile
    # Signals reach one thread alone; what others do goes on, here at another time.
    world.meanwhile = lambda: None
    outcome = part(world, world.rng.choice(world.lines))
    world.meanwhile = meanwhile
    return f"{part.__name__}_{outcome}"


ACTIONS = {"interrupt": (interrupted, 2.5)}
