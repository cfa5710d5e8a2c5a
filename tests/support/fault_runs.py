"""SmolLM2 over a copy of one saved conversation, with faults of the caller's choice, and the account afterwards."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, budget_of, generate, logits

import kvstrata
from kvstrata.contract.receipts import RestoreReceipt
from kvstrata.engines.transformers.context import segment_layout
from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.parts import MemoryParts
from kvstrata.engines.transformers.request import Request
from kvstrata.store import Store
from kvstrata.store.promotion import Promoter
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan, Injection
from kvstrata.tiers.faulty import FaultyBacking, FaultyTier
from kvstrata.tiers.faulty_files import FaultyFiles
from kvstrata.tiers.files import OsFiles

CHUNKS = 5
LENGTH = CHUNKS * CHUNK + 9
LAYERS = 30
NEW = 3
SEGMENTS = CHUNKS * LAYERS
PAGE = Path(__file__).parent.parent.parent / "docs" / "how-it-works.md"


@dataclass(frozen=True)
class Setup:
    """A memory: `slots` of the device, one open chunk in all layers and two layers of the sealed ones by default, and
    `host` slots of a host tier, none by default. All sealed chunks are cold in every step."""

    name: str
    host: int = 0
    slots: int = LAYERS + 2 * CHUNKS

    def options(self, model: Any) -> dict[str, Any]:
        size = -(-segment_layout(model, CHUNK).segment_bytes // 4096) * 4096
        return {
            "chunk_tokens": CHUNK,
            "prefill_chunk": CHUNK,
            "budget": budget_of(model, self.slots, prefill=CHUNK),
            "host_budget": self.host * size or None,
        }


FILES = Setup("device+files")
HOST = Setup("device+host+files", host=SEGMENTS)
SETUPS = pytest.mark.parametrize(
    "setup", [FILES, pytest.param(HOST, marks=pytest.mark.faults)], ids=lambda setup: setup.name
)
"""Both memories; the default tests run the first."""
BOTH = pytest.mark.parametrize("setup", [FILES, HOST], ids=lambda setup: setup.name)


def once(operation: str, call: int, fault: Fault, **options: Any) -> FaultPlan:
    """`fault` at one call of `operation`, counted from 0 once the faults are on."""
    return FaultPlan(explicit=(Injection(operation, call, fault),), **options)


class FastClock:
    """Real seconds, and those that a test puts `ahead`."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.ahead


class Scene:
    """One attached memory over its own copy of the store, and the request that continues the saved conversation.

    Faults are off while the scene is set and on in the body. `account` closes everything and demands that nothing is
    left out.
    """

    def __init__(self, smol: SavedModel, memory: Memory, injector: FaultInjector, clock: FastClock) -> None:
        self.smol = smol
        self.clock = clock
        self.memory = memory
        self.store = memory.store
        self.injector = injector
        self.request, self.restored = self.restore()
        injector.enabled = True

    @property
    def promoter(self) -> Promoter:
        return self.memory._attached()

    @property
    def recomputed(self) -> list[tuple[int, str]]:
        """Where rows were computed again, and why."""
        return [(item.start, item.reason.value) for item in self.memory.ledger().recomputes]

    @property
    def faults(self) -> list[tuple[str, str]]:
        """What was injected."""
        return [(each.operation, each.fault.value) for each in self.injector.log]

    def restore(self) -> tuple[Request, RestoreReceipt]:
        return self.memory.restore("talk", self.smol.ids[0].tolist())

    def restart(self) -> RestoreReceipt:
        """Close the request and restore the conversation anew."""
        self.request.close()
        self.request, receipt = self.restore()
        return receipt

    def digest(self, index: int) -> bytes:
        return self.request.history.chunks[index].digest

    def path(self, digest: bytes) -> Path:
        return self.store.file_tier.path(digest)

    def run(self, request: Request | None = None, new: int = NEW) -> torch.Tensor:
        """Logits [new, vocabulary] of the tokens after the prompt."""
        request = request or self.request
        return logits(generate(self.smol.model, self.smol.ids, new, request.generate_kwargs()))

    def at_layer(self, layer: int, act: Callable[[], None]) -> Any:
        """Call `act` once, ahead of the next forward of one layer; returns the hook's handle."""

        def before(*_: object) -> None:
            handle.remove()
            act()

        handle = self.smol.model.model.layers[layer].register_forward_pre_hook(before)
        return handle

    def until(self, there: Callable[[], bool]) -> None:
        """Wait for what another thread does."""
        pause = threading.Event()
        for _ in range(6000):
            if there():
                return
            pause.wait(0.005)
        raise AssertionError("it has not happened within half a minute")

    @contextmanager
    def deadlines_pass(self, met: Callable[[], bool] | None = None) -> Iterator[None]:
        """In the block every deadline is over soon after the fault was `met`, by the memory's clock and not by ours."""
        over, queue = threading.Event(), self.promoter.queue

        def fly() -> None:
            while not over.wait(0.005):
                if met() if met is not None else self.injector.log:
                    self.clock.ahead += 10
                    queue.expire()
                    with queue.lock:
                        queue.changed.notify_all()

        thread = threading.Thread(target=fly)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def settle(self) -> None:
        """Wait until no reader is at work."""
        book = self.promoter.queue.book
        self.until(lambda: not book.copying and not book.queue)

    def account(self) -> None:
        """Close all requests: no slot, no credit, no transfer and no record may be left."""
        self.injector.enabled = False
        self.injector.let_go()
        for request in list(self.memory._requests):
            request.close()
        if self.memory.publisher is not None:
            self.memory.publisher.wait()
        self.settle()
        assert self.memory.arena.used_slots == 0
        host = self.memory.directory.host
        assert host is None or host.used_slots == 0
        pool, book = self.promoter.pool, self.promoter.queue.book
        assert (pool.outstanding, pool.free) == ((), pool.total)
        assert (len(book.transfers), len(book.open)) == (0, 0)
        assert len(self.memory.directory) == 0
        assert self.memory.ledger().peak_device_bytes <= self.memory.budget


class SavedModel:
    """SmolLM2 in float32, a prompt of real text, and a store in which all of it but its last token is saved.

    cold: logits of a run whose rows never left memory.
    """

    def __init__(self, loaded: Any, folder: Path) -> None:
        self.loaded = loaded
        self.model = loaded.model
        text = PAGE.read_text(encoding="utf-8")
        self.ids = torch.tensor([loaded.tokenizer.encode(text)[:LENGTH]])
        self.folder = folder
        self._undisturbed: dict[Setup, torch.Tensor] = {}
        with kvstrata.attach(loaded, folder / "saved", chunk_tokens=CHUNK, prefill_chunk=CHUNK) as memory:
            request = memory.prefill(self.ids[0].tolist())
            memory.save("talk")
            self.cold = logits(generate(self.model, self.ids, NEW, request.generate_kwargs()))

    def expected(self, setup: Setup) -> torch.Tensor:
        """Logits of a run in the same memory that nothing disturbs. The bits are those of the cold run."""
        if setup not in self._undisturbed:
            with self.scene(self.folder / f"undisturbed-{len(self._undisturbed)}", setup) as scene:
                found = scene.run()
                assert scene.recomputed == []
                assert scene.memory.ledger().traffic["file"].moved_bytes > 0
                scene.account()
            assert torch.equal(found, self.cold)
            self._undisturbed[setup] = found
        return self._undisturbed[setup]

    @contextmanager
    def scene(
        self,
        folder: Path,
        setup: Setup = FILES,
        plan: FaultPlan | None = None,
        *,
        at: str = "tier",
        store: dict[str, Any] | None = None,
        injector: FaultInjector | None = None,
        **options: Any,
    ) -> Iterator[Scene]:
        """A scene over a copy of the saved store.

        plan, injector: what goes wrong. at: where: in the `tier` above the checksums, in the `files` below them, in the
        memory of the `host` tier, or nowhere but where `options` or `store` put it.
        """
        injector = injector or FaultInjector(plan or FaultPlan())
        injector.enabled = False
        shutil.copytree(self.folder / "saved", folder)
        opening = dict(store or {})
        clock = FastClock()
        parts = replace(options.pop("parts", MemoryParts()), clock=clock)
        if at == "tier":
            opening.setdefault("wrap_tier", lambda tier: FaultyTier(tier, injector))
        elif at == "files":
            opening["files"] = FaultyFiles(OsFiles(), injector)
        elif at == "host":
            make = parts.host_backing
            parts = replace(parts, host_backing=lambda size, slots: FaultyBacking(make(size, slots), injector))
        try:
            with (
                Store(folder, **opening) as opened,
                kvstrata.attach(self.loaded, opened, **(setup.options(self.model) | options), parts=parts) as memory,
            ):
                yield Scene(self, memory, injector, clock)
        finally:
            injector.enabled = False
            injector.let_go()
