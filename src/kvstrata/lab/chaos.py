"""Writes, reads, verifications, removals and deaths on a store while its disk fails on purpose.

Every read is either right, byte for byte, or refused with a reason; what was acknowledged as stored is there at the
end; no credit and no slot stays out. All of it follows from one seed.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from kvstrata.contract.identity import CacheAbi, ChunkContext, ChunkIdentity, ModelIdentity, Namespace, PositionRule
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import DamagedError, Reason, StoreError
from kvstrata.lab.chaos_reader import ChaosReader
from kvstrata.store import Store
from kvstrata.tiers.fault_plan import Fault, FaultInjector, FaultPlan, Injection, Killed
from kvstrata.tiers.faulty import FaultyTier
from kvstrata.tiers.faulty_files import FaultyFiles
from kvstrata.tiers.files import payload_bytes
from kvstrata.tiers.filesystem import OsFiles

__all__ = ["CHAOS_TENANT", "ChaosFailure", "ChaosReport", "KnownChunk", "run_chaos"]

CHAOS_TENANT = "kvstrata-chaos"
"""Tenant of the chunks that are written here, so that nobody else can ever find them."""

_LAYERS = 2
_LAYOUT = SegmentLayout(kv_heads=1, query_heads=1, head_dim=8, dtype="float32", chunk_tokens=64)
_CONTEXT = ChunkContext(
    ModelIdentity("id:chaos"),
    CacheAbi(_LAYERS, 1, 1, 8, "float32"),
    PositionRule("default", 10000.0),
    Namespace(CHAOS_TENANT),
    chunk_tokens=64,
)
_SAMPLE = 64
_LOSSES = frozenset({"link", "replace", "write"})


@dataclass
class KnownChunk:
    """What a chunk must read as. checksums: of each segment. durable: it was acknowledged, and must be there; else it
    may be missing, but never be other bytes."""

    identity: ChunkIdentity
    layout: SegmentLayout
    checksums: tuple[bytes, ...]
    durable: bool


@dataclass(frozen=True, slots=True)
class ChaosFailure:
    """What must not happen: a wrong row, a lost chunk, a leak. injected: the faults of that step."""

    step: int
    what: str
    injected: tuple[Injection, ...]


@dataclass
class ChaosReport:
    """What was done and met. counts: operations and how they ended. refusals: by reason or outcome. injected: by
    fault. sampled: chunks of the store that were read. damaged_before: of those, unsound before anything was injected.
    """

    seed: int
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    failures: list[ChaosFailure] = field(default_factory=list)
    sampled: int = 0
    damaged_before: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing happened that must not."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = {item.name: getattr(self, item.name) for item in fields(self)}
        plain = {name: dict(value) if isinstance(value, Counter) else value for name, value in names.items()}
        return plain | {"failures": [asdict(each) for each in self.failures]}


def run_chaos(
    path: Path,
    *,
    steps: int,
    seed: int,
    rates: Mapping[Fault, float],
    explicit: Sequence[Injection] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ChaosReport:
    """Work on the store at `path` for `steps` steps. Chunks found there are only read; own ones are removed at the end,
    also after Ctrl-C. Blocks. HANG would stop a run that has no second thread and is not to be among `rates`.

    Errors: `StoreError` when the store cannot be opened.
    """
    return _Run(path, seed, FaultPlan(seed, dict(rates), tuple(explicit), delay_s=0.0)).run(steps, progress)


class _Run:
    def __init__(self, path: Path, seed: int, plan: FaultPlan) -> None:
        self._path = path
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._injector = FaultInjector(plan)
        self._known: dict[bytes, KnownChunk] = {}
        self._own: list[bytes] = []
        self._payloads: dict[bytes, list[list[memoryview]]] = {}
        self._report = ChaosReport(seed)
        self._logged = 0
        self._open()

    def run(self, steps: int, progress: Callable[[int, int], None]) -> ChaosReport:
        try:
            self._sample()
            self._injector.enabled = True
            for step in range(steps):
                self._step(step)
                progress(step + 1, steps)
            self._injector.enabled = False
            self._reopen()
            self._last_look(steps)
        finally:
            self._injector.enabled = False
            self._injector.revive()
            self._store.close()
            self._clean_up()
        self._report.injected = Counter(str(each.fault) for each in self._injector.log)
        return self._report

    def _open(self) -> None:
        self._injector.enabled = False
        self._injector.revive()
        self._store = Store(self._path, create=False, read_only=False, files=FaultyFiles(OsFiles(), self._injector))
        self._tier = FaultyTier(self._store.tier, self._injector)
        self._reader = ChaosReader(self._tier, self._injector)

    def _reopen(self) -> None:
        self._injector.enabled = False
        self._store.close()
        self._open()

    def _sample(self) -> None:
        found = sorted(self._store.tier.list())
        for chunk in self._random.sample(found, min(_SAMPLE, len(found))):
            try:
                with self._store.tier.open(chunk) as reader:
                    scratch = memoryview(bytearray(reader.segment_bytes))
                    sums = []
                    for layer in range(reader.layers):
                        reader.read_into(layer, [scratch])
                        sums.append(xxh3_128_digest(scratch))
                    self._known[chunk] = KnownChunk(reader.identity, reader.layout, tuple(sums), durable=True)
            except StoreError:
                self._report.damaged_before += 1
        self._report.sampled = len(self._known)

    def _step(self, step: int) -> None:
        self._report.steps += 1
        self._logged = len(self._injector.log)
        action = self._random.choices(["write", "read", "verify", "remove"], [30, 50, 10, 10])[0]
        if action != "write" and not self._known:
            action = "write"
        self._report.counts[action] += 1
        try:
            getattr(self, f"_{action}")(step)
        except StoreError as error:
            self._report.refusals[str(error.reason)] += 1
        except Killed:
            self._report.counts["deaths"] += 1
            self._reopen()
            self._injector.enabled = True
            return
        leak = self._reader.leaked()
        if leak:
            self._fail(step, leak)
            self._reader = ChaosReader(self._tier, self._injector)

    def _write(self, step: int) -> None:
        again = self._own and self._random.random() < 0.3
        chunk = self._random.choice(self._own) if again else self._new()
        known = self._known[chunk]
        # Until it is acknowledged, either is right: that it is there, and that it is not.
        known.durable = False
        self._tier.write(known.identity, known.layout, self._payloads[chunk])
        lost = any(
            each.fault is Fault.LOSE and each.operation in _LOSSES for each in self._injector.log[self._logged :]
        )
        known.durable = not lost
        self._report.counts["acknowledged"] += 1

    def _new(self) -> bytes:
        tokens = self._random.randint(1, _LAYOUT.chunk_tokens)
        ids = tuple(self._random.randrange(2**32) for _ in range(tokens))
        identity = ChunkIdentity(_CONTEXT, b"", 0, ids)
        rows = [self._random.randbytes(payload_bytes(_LAYOUT, tokens)) for _ in range(_LAYERS)]
        sums = tuple(xxh3_128_digest(each) for each in rows)
        self._known[identity.digest] = KnownChunk(identity, _LAYOUT, sums, durable=False)
        self._payloads[identity.digest] = [[memoryview(each)] for each in rows]
        self._own.append(identity.digest)
        return identity.digest

    def _read(self, step: int) -> None:
        known = self._known[self._pick()]
        layers = self._random.sample(range(len(known.checksums)), self._random.randint(1, min(3, len(known.checksums))))
        for ended in self._reader.read(known, layers, self._random):
            if ended.rows is None:
                self._report.refusals[ended.outcome] += 1
            elif ended.rows == [known.checksums[layer] for layer in layers]:
                self._report.counts["right"] += 1
            else:
                self._fail(step, f"wrong rows of chunk {known.identity.digest.hex()}, layers {layers}")

    def _pick(self) -> bytes:
        there = [chunk for chunk, known in self._known.items() if known.durable]
        return self._random.choice(there if there and self._random.random() < 0.9 else list(self._known))

    def _verify(self, step: int) -> None:
        with self._tier.open(self._pick()) as reader:
            reader.verify_payload()
        self._report.counts["sound"] += 1

    def _remove(self, step: int) -> None:
        if self._own:
            chunk = self._random.choice(self._own)
            self._known[chunk].durable = False
            self._tier.revoke(chunk)

    def _last_look(self, step: int) -> None:
        self._logged = len(self._injector.log)
        for chunk, known in self._known.items():
            try:
                with self._store.tier.open(chunk) as reader:
                    reader.verify_payload()
                    scratch = memoryview(bytearray(reader.segment_bytes))
                    for layer, checksum in enumerate(known.checksums):
                        reader.read_into(layer, [scratch])
                        if xxh3_128_digest(scratch) != checksum:
                            self._fail(step, f"wrong rows of chunk {chunk.hex()}, layer {layer}, after reopening")
            except StoreError as error:
                damaged = isinstance(error, DamagedError) and error.reason is not Reason.CHUNK_MISSING
                if known.durable or damaged:
                    self._fail(step, f"{'acknowledged' if known.durable else 'visible'} chunk lost: {error.cause}")
            else:
                self._report.counts["found_again"] += 1

    def _fail(self, step: int, what: str) -> None:
        self._report.failures.append(ChaosFailure(step, what, tuple(self._injector.log[self._logged :])))

    def _clean_up(self) -> None:
        names = {chunk.hex() for chunk in self._own}
        with contextlib.suppress(StoreError), Store(self._path, create=False) as sound:
            sound.evict(self._own)
            # What a removal that only seemed to happen has left, which no row names.
            for chunk in self._own:
                sound.file_tier.path(chunk).unlink(missing_ok=True)
        for folder in ("damaged", "tmp"):
            for path in (self._path / folder).glob("*"):
                if path.name.split(".")[0] in names:
                    with contextlib.suppress(OSError):
                        path.unlink()
