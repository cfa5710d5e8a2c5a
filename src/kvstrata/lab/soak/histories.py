"""Actions on histories: rows come, are taken back, forked, restored and given up, and several share chunks."""

from __future__ import annotations

from kvstrata.contract.states import ResidencyState
from kvstrata.errors import Reason, StateError
from kvstrata.lab.soak.reference import Line, require
from kvstrata.lab.soak.rows import CONTEXTS, LAYERS, SIZE, Truth, first_state, next_state, segment, write_row
from kvstrata.lab.soak.world import World
from kvstrata.store.directory import ChunkRecord
from kvstrata.store.history import History

__all__ = ["ACTIONS", "extend", "give_up", "note_sealed", "put_rows"]

_LINES = 6
_ROWS = 5 * SIZE
_SCRIPTS = 3


def open_line(world: World) -> str:
    """A new request, of a tenant and a prompt that others have as well."""
    if len(world.lines) >= _LINES:
        return "idle"
    context = world.rng.choice(CONTEXTS)
    history = History(world.directory, context)
    world.lines.append(Line(history, world.rng.randrange(_SCRIPTS), first_state(context)))
    return "opened"


def append(world: World) -> str:
    """Rows come in: slots, bytes in all layers, then the frontier moves."""
    if not world.lines:
        return "idle"
    line, rows = world.rng.choice(world.lines), world.rng.randint(1, SIZE + 2)
    history = line.history
    if history.frontier + rows > _ROWS:
        return "long"
    missing = max(0, history.tail_chunks_for(rows) - len(history.tail)) * LAYERS
    free = world.directory.arena.free_slots
    got = history.extend_tail(rows)
    require(got == (missing <= free), "slots for a tail were refused or found:", missing, free)
    if not got:
        return "full"
    if world.rng.random() < 0.08:
        return "reserved"
    return extend(world, line, rows)


def extend(world: World, line: Line, rows: int) -> str:
    """Write `rows` rows into slots that are there, and commit them."""
    line.history.commit(rows, put_rows(world, line, rows))
    return f"sealed_{note_sealed(world, line)}"


def put_rows(world: World, line: Line, rows: int) -> list[int]:
    """Write `rows` rows after the frontier in all layers, and note them; returns their tokens."""
    history, tokens, states = line.history, list[int](), list[bytes]()
    backing, last = world.directory.arena.backing, line.last
    for position in range(history.frontier, history.frontier + rows):
        token = (line.script * 7 + position) % 5 if world.rng.random() < 0.95 else world.rng.randrange(5)
        last = next_state(last, token)
        tokens.append(token)
        states.append(last)
        chunk = history.tail[position // SIZE - len(history.chunks)]
        for layer, grant in enumerate(chunk.grants):
            write_row(backing.writable(grant.slot), position % SIZE, last, layer)
    line.tokens += tokens
    line.states += states
    return tokens


def note_sealed(world: World, line: Line) -> int:
    """Note what the chunks of a line must hold; how many there are that were unknown before."""
    history, new = line.history, 0
    full = history.committed // SIZE
    require(len(history.chunks) == full, "chunks sealed are", len(history.chunks), "not", full)
    for index, record in enumerate(history.chunks):
        tokens = tuple(line.tokens[index * SIZE : (index + 1) * SIZE])
        require(record.identity.token_ids == tokens, "a chunk was sealed with other tokens")
        if record.digest not in world.truths:
            states = tuple(line.states[index * SIZE : (index + 1) * SIZE])
            segments = tuple(segment(states, layer) for layer in range(LAYERS))
            world.truths[record.digest] = Truth(record.identity, states, segments)
            new += 1
    return new


def rewind(world: World) -> str:
    """Rows are taken back: to a chunk's boundary, within the open tail, or to where it cannot be done."""
    if not world.lines:
        return "idle"
    line = world.rng.choice(world.lines)
    history = line.history
    position = world.rng.randint(-1, history.frontier + 1)
    if world.rng.random() < 0.7:
        position = world.rng.choice([history.frontier, history.sealed, position // SIZE * SIZE])
    legal = 0 <= position <= history.frontier and not (position < history.sealed and position % SIZE)
    try:
        history.rewind(position)
    except StateError as error:
        require(not legal and error.reason is Reason.OPERATION_UNSUPPORTED, "a cut was refused at", position)
        return "refused"
    require(legal, "a history was cut at", position)
    del line.tokens[position:], line.states[position:]
    return "sealed" if position % SIZE == 0 else "tail"


def hold(world: World) -> str:
    """Rows from here on are drafts; or they are no drafts any more."""
    if not world.lines:
        return "idle"
    line = world.rng.choice(world.lines)
    history = line.history
    if history.hold is None:
        history.hold = history.frontier
        return "held"
    history.hold = None
    history.settle()
    note_sealed(world, line)
    return "settled"


def fork(world: World) -> str:
    """A beam splits: sealed chunks are shared, the open tail is copied."""
    if not world.lines or len(world.lines) >= _LINES:
        return "idle"
    line = world.rng.choice(world.lines)
    needed, free = len(line.history.tail) * LAYERS, world.directory.arena.free_slots
    other = line.history.fork()
    require((other is None) == (needed > free), "a fork found or lacked slots:", needed, free)
    if other is None:
        return "full"
    script = world.rng.randrange(_SCRIPTS)
    world.lines.append(Line(other, script, line.start, list(line.tokens), list(line.states)))
    return "forked"


def restore(world: World) -> str:
    """A history goes on by a chunk that the tier says it has."""
    lines = [line for line in world.lines if not line.history.tail and line.history.hold is None]
    if not lines:
        return "idle"
    line = world.rng.choice(lines)
    history = line.history
    parent = history.chunks[-1].digest if history.chunks else b""
    for digest in world.tier.list():
        truth = world.truths[digest]
        if truth.identity.parent == parent and truth.identity.context == history.context:
            if history.frontier + SIZE > _ROWS or not world.faulty.has(digest):
                return "miss"
            history.append_stored(truth.identity)
            line.tokens += truth.identity.token_ids
            line.states += truth.states
            return "restored"
    return "miss"


def close(world: World) -> str:
    """A request ends, and takes along what only it had."""
    if not world.lines:
        return "idle"
    give_up(world, world.rng.choice(world.lines))
    return "closed"


def give_up(world: World, line: Line) -> None:
    """End one line."""
    world.lines.remove(line)
    line.history.close()


def pin(world: World) -> str:
    """A chunk is kept without a history, as a look-up does, or no longer."""
    if world.pins and world.rng.random() < 0.6:
        world.directory.drop(world.pins.pop(world.rng.randrange(len(world.pins))))
        return "dropped"
    names = list(world.tier.list())
    if names and world.rng.random() < 0.5:
        digest = world.rng.choice(names)
        if not world.faulty.has(digest):
            return "miss"
        world.pins.append(world.directory.acquire(world.truths[digest].identity, on_file=True))
        return "acquired"
    records = world.records()
    if not records:
        return "idle"
    record = world.rng.choice(records)
    world.directory.share(record)
    world.pins.append(record)
    return "shared"


def rescue(world: World) -> str:
    """A chunk that was lost is computed again: in place, or by cutting histories where it began."""
    gone = [
        (record, layer)
        for record in world.directory
        for layer in range(LAYERS)
        if not world.directory.valid_copies(record, layer)
    ]
    if not gone:
        return "idle"
    record, layer = world.rng.choice(gone)
    if world.rng.random() < 0.5:
        return _compute(world, record, layer)
    for line in world.lines:
        if record in line.history.chunks:
            position = line.history.chunks.index(record) * SIZE
            line.history.rewind(position)
            del line.tokens[position:], line.states[position:]
    for _ in range(world.pins.count(record)):
        world.pins.remove(record)
        world.directory.drop(record)
    return "cut"


def _compute(world: World, record: ChunkRecord, layer: int) -> str:
    if record.residency[layer] is not ResidencyState.DEVICE_RELEASED:
        return "busy"
    grant = world.directory.reserve(record, layer)
    if grant is None:
        return "full"
    world.directory.arena.backing.writable(grant.slot)[:] = world.truths[record.digest].segments[layer]
    world.directory.publish(record, layer, grant)
    return "computed"


ACTIONS = {
    "open": (open_line, 3),
    "append": (append, 16),
    "rewind": (rewind, 3),
    "hold": (hold, 2),
    "fork": (fork, 2),
    "restore": (restore, 3),
    "close": (close, 1.6),
    "pin": (pin, 3),
    "rescue": (rescue, 2),
}
