"""Ctrl-C and kill -9 at any moment: what was published stays whole, and the same request goes on rightly."""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from chunks_and_faults import flip
from engine_cases import CHUNK, attach, chunk_files, generate, least_budget, logits, patched_layer, prompt

from kvstrata.engines.transformers.memory import Memory
from kvstrata.errors import Reason, StoreError
from kvstrata.store import Store
from kvstrata.tiers.files import OsFiles

LAYERS = 3
LENGTH = 6 * CHUNK + 21
NEW = 6


def expected_run(model: Any, budget: int, store: Path) -> Any:
    with attach(model, store, budget=budget) as memory:
        return generate(model, prompt(LENGTH), NEW, memory.generate_kwargs())


def require_sound(store: Path) -> None:
    with Store(store) as opened:
        assert {verdict.reason for verdict in opened.verify()} <= {None}
        assert opened.usage().temporary == 0


class _At:
    """Raises KeyboardInterrupt at the given call."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("step", [1, 4, 5, 8])
def test_ctrl_c_inside_a_step(tiny_llama: Callable[..., Any], tmp_path: Path, layer: int, step: int) -> None:
    """Steps 1 to 5 are those of the prefill: four slices and the last row."""
    model, ids = tiny_llama("bfloat16", layers=LAYERS), prompt(LENGTH)
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    expected = expected_run(model, budget, tmp_path / "undisturbed")
    with attach(model, tmp_path / "store", budget=budget) as memory:
        request = memory.request()
        with pytest.raises(KeyboardInterrupt), patched_layer(model, layer, _At(step)):
            generate(model, ids, NEW, request.generate_kwargs())
        done = request.frontier
        assert not request.in_step
        assert request.token_ids == expected.sequences[0, :done].tolist()
        for record in request.history.chunks:
            memory.publisher.wait(record)  # what is still being written is no file of the store yet
        for chunk in chunk_files(tmp_path / "store"):
            with memory.store.tier.open(bytes.fromhex(chunk.stem)) as file:
                file.verify_payload()
        start = max(LENGTH, done + 1)
        ours = generate(model, expected.sequences[:, :start], NEW - start + LENGTH, request.generate_kwargs())
        assert torch.equal(logits(ours), logits(expected)[start - LENGTH :])
        assert ours.sequences.tolist() == expected.sequences.tolist()
        memory.save("talk")
    require_sound(tmp_path / "store")


def _main_thread_waits() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return {"before_layer", "finish", "wait"} <= names


class _InterruptingReads(OsFiles):
    """One read of a segment sends Ctrl-C to the main thread, which waits for it."""

    armed = False

    def preadv(self, fd: int, buffers: Any, offset: int, /) -> int:
        if self.armed and threading.current_thread() is not threading.main_thread():
            self.armed = False
            while not _main_thread_waits():
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.1)
        return os.preadv(fd, buffers, offset)


def test_ctrl_c_while_waiting_for_a_read(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """No slot is lost, however often it happens."""
    model, ids, files = tiny_llama(layers=LAYERS), prompt(LENGTH), _InterruptingReads()
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    expected = expected_run(model, budget, tmp_path / "undisturbed")
    with Store(tmp_path / "store", files=files) as store, attach(model, store, budget=budget) as memory:
        request = memory.prefill(ids[0].tolist())
        memory.save("talk")
        for _ in range(6):
            request.plan.yield_memory()
            assert memory.arena.used_slots == LAYERS
            files.armed = True
            with pytest.raises(KeyboardInterrupt):
                generate(model, ids, NEW, request.generate_kwargs())
            assert request.frontier == LENGTH - 1
        ours = generate(model, ids, NEW, request.generate_kwargs())
    assert torch.equal(logits(ours), logits(expected))


_INTERRUPTED = ("promotion.py", "layer_ahead.py", "tables.py", "tiers/memory.py", "history.py", "directory.py")


def _interrupted(call: Callable[[], object], line: int) -> bool:
    """Run `call` with a KeyboardInterrupt before its `line`th line in the files that move segments; whether it came."""
    passed = 0

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal passed
        if not frame.f_code.co_filename.endswith(_INTERRUPTED):
            return None
        # Python serves no signal between the end of a `with` body and the release of its lock, but traces a line there.
        lock = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not lock:
            passed += 1
            if passed == line:
                raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def _accounted_slots(memory: Memory) -> int:
    """Slots that a chunk or an open tail stands for."""
    tails = sum(len(row.history.tail) * LAYERS for request in memory._requests for row in request.rows)
    return tails + sum(record.resident for record in memory.directory)


@pytest.mark.parametrize("first", range(8))
def test_ctrl_c_before_any_line_that_moves_segments_loses_no_slot(
    tiny_llama: Callable[..., Any], tmp_path: Path, first: int
) -> None:
    """Slots are taken, read into, noted and given up line by line; the interrupt comes between any two of them."""
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    expected = expected_run(model, budget, tmp_path / "undisturbed")
    with attach(model, tmp_path / "store", budget=budget) as memory:
        memory.save("talk", memory.prefill(ids[0].tolist()))
        memory.latest.close()
        line, came = 1 + first, True
        while came:
            request, _ = memory.restore("talk", ids[0].tolist())
            came = _interrupted(lambda: model(ids[:, -1:], past_key_values=request.cache), line)  # noqa: B023
            request.plan.abort_step()
            assert memory.arena.used_slots == _accounted_slots(memory), line
            request.close()
            assert memory.arena.used_slots == 0, line
            line += 8 * 5
        assert line > 400
        request, _ = memory.restore("talk", ids[0].tolist())
        ours = generate(model, ids, NEW, request.generate_kwargs())
        assert memory.ledger().recomputes == ()
    assert torch.equal(logits(ours), logits(expected))


@pytest.mark.parametrize("call", [2, 3, 5])
def test_ctrl_c_inside_a_recovery(tiny_llama: Callable[..., Any], tmp_path: Path, call: int) -> None:
    """The rows that were to be recomputed are not forgotten: the next step starts with them.

    The first call is that of the step that meets the damage, the others are those of the four slices computed again.
    """
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    expected = expected_run(model, budget, tmp_path / "undisturbed")
    with attach(model, tmp_path / "store", budget=budget) as memory:
        request = memory.prefill(ids[0].tolist())
        memory.save("talk")
        request.plan.yield_memory()
        path = memory.store.tier.path(request.history.chunks[1].digest)
        flip(path, path.stat().st_size - 9)
        with pytest.raises(KeyboardInterrupt), patched_layer(model, 2, _At(call)):
            generate(model, ids, NEW, request.generate_kwargs())
        assert request.history.frontier < LENGTH - 1
        assert request.frontier == LENGTH - 1
        assert request.token_ids == ids[0, :-1].tolist()
        step = model(ids[:, -1:], past_key_values=request.cache)
        assert request.frontier == LENGTH
        assert torch.allclose(step.logits[0, -1], logits(expected)[0], atol=1e-4)
        ours = generate(model, expected.sequences[:, : LENGTH + 1], NEW - 1, request.generate_kwargs())
        assert ours.sequences.tolist() == expected.sequences.tolist()
        assert memory.save("talk").frontier == LENGTH + NEW - 1


def test_a_save_after_an_interrupted_recovery_is_whole(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    with attach(model, tmp_path / "store", budget=least_budget(model, LENGTH + NEW, tmp_path / "probe")) as memory:
        request = memory.prefill(ids[0].tolist())
        memory.save("talk")
        request.plan.yield_memory()
        path = memory.store.tier.path(request.history.chunks[0].digest)
        flip(path, path.stat().st_size - 9)
        with pytest.raises(KeyboardInterrupt), patched_layer(model, 2, _At(2)):
            model(ids[:, -1:], past_key_values=request.cache)
        assert memory.save("talk").frontier == LENGTH - 1


class _Late(OsFiles):
    """Reads of segments wait until the test lets them go on."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def preadv(self, fd: int, buffers: Any, offset: int, /) -> int:
        if threading.current_thread() is not threading.main_thread():
            self.gate.wait(60)
        return os.preadv(fd, buffers, offset)


def test_a_late_read_is_refused_and_does_no_harm(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Nobody gets its slot before it has ended, and the chunk is no miss."""
    model, ids, files = tiny_llama(layers=LAYERS), prompt(LENGTH), _Late()
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    expected = expected_run(model, budget, tmp_path / "undisturbed")
    with (
        Store(tmp_path / "store", files=files) as store,
        attach(model, store, budget=budget, read_timeout_s=0.05) as memory,
    ):
        request = memory.prefill(ids[0].tolist())
        memory.save("talk")
        request.plan.yield_memory()
        files.gate.clear()
        with pytest.raises(StoreError) as refusal:
            generate(model, ids, NEW, request.generate_kwargs())
        assert refusal.value.reason is Reason.STORE_LATE
        held = memory.arena.used_slots
        assert held > LAYERS
        files.gate.set()
        while memory.arena.used_slots > LAYERS:
            time.sleep(0.001)
        memory._read_timeout_s = memory._attached()._timeout_s = 30.0
        ours = generate(model, ids, NEW, request.generate_kwargs())
        assert memory.ledger().recomputes == ()
    assert torch.equal(logits(ours), logits(expected))


_CHILD = """
import sys, torch
sys.path[:0] = [{support!r}]
from engine_cases import attach, prompt
torch.set_num_threads(1)
model = torch.load({model!r}, weights_only=False)
memory = attach(model, {store!r}, budget={budget})
try:
    with memory:
        request = memory.prefill(prompt({length})[0].tolist())
        memory.save("before")
        print("running", flush=True)
        ids = prompt({length})[:, -1:]
        while True:
            ids = model(ids, past_key_values=request.cache).logits[:, -1:].argmax(-1)
            if request.frontier % 16 == 0:
                memory.save("talk")
            if request.frontier > {length} + 400:
                request.close()
                request = memory.restore("before")[0]
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def test_signals_to_processes_that_generate(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Whatever moment they hit, the stores verify clean and every session in them can be continued."""
    model, numbers = tiny_llama(layers=LAYERS), (signal.SIGINT, signal.SIGKILL)
    torch.save(model, tmp_path / "model.pt")
    budget = least_budget(model, LENGTH + 500, tmp_path / "probe")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    children = []
    for number in numbers:
        script = _CHILD.format(
            support=str(Path(__file__).parents[2] / "support"),
            model=str(tmp_path / "model.pt"),
            store=str(tmp_path / number.name),
            budget=budget,
            length=LENGTH,
        )
        command = [sys.executable, "-c", script]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    for number, child in zip(numbers, children, strict=True):
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "running\n"
            time.sleep(0.3)
            child.send_signal(number)
            output = child.stdout.read()
        interrupted = number is signal.SIGINT
        assert child.returncode == (130 if interrupted else -signal.SIGKILL)
        assert output == ("interrupted\n" if interrupted else "")
        require_sound(tmp_path / number.name)
        with attach(model, tmp_path / number.name, budget=budget) as memory:
            request, receipt = memory.restore("before", prompt(LENGTH)[0].tolist())
            assert receipt.hit
            generate(model, prompt(LENGTH), 2, request.generate_kwargs())
            _require_continues(memory)


def _require_continues(memory: Memory) -> None:
    from kvstrata.sessions import SessionStore

    for summary in SessionStore(memory.store).list():
        assert summary.latest is not None
        assert not summary.damaged
        request, receipt = memory.restore(summary.latest.name)
        assert receipt.hit
        memory.model(prompt(1), past_key_values=request.cache)
        assert memory.ledger().recomputes == ()
        request.close()
