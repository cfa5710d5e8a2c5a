"""A store that keeps its promises passes; each way of breaking one is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import make_chunk, tree, write_all

from kvstrata.lab.chaos import ChaosReport, run_chaos
from kvstrata.store import Store
from kvstrata.store.credit_pool import CreditPool
from kvstrata.tiers.fault_plan import Fault, Injection
from kvstrata.tiers.faulty import FaultyReader
from kvstrata.tiers.files import FileTier

RATES = {fault: 0.02 for fault in Fault if fault is not Fault.HANG} | {Fault.DIE: 0.002}
STEPS = 150


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store(tmp_path / "store") as opened:
        write_all(opened.tier, [make_chunk(seed, tokens=128 - seed) for seed in range(4)])
    return tmp_path / "store"


def run(store: Path, seed: int = 1, **options: Any) -> ChaosReport:
    return run_chaos(store, **({"steps": STEPS, "seed": seed, "rates": RATES} | options))


@pytest.mark.parametrize("seed", range(4))
def test_every_read_is_right_or_refused(store: Path, seed: int) -> None:
    before = {name: raw for name, raw in tree(store).items() if name.startswith("chunks")}
    report = run(store, seed)
    assert report.failures == []
    assert (report.ok, report.steps, report.sampled, report.damaged_before) == (True, STEPS, 4, 0)
    assert report.counts["right"] > 10
    assert report.refusals.total() > 10
    assert report.counts["found_again"] >= 4
    assert len(report.injected) >= 6
    assert {name: raw for name, raw in tree(store).items() if not name.endswith("store.json")} == before


def test_the_seed_repeats_it(store: Path, tmp_path: Path) -> None:
    first, second = run(store, 7), run(store, 7)
    assert (first.counts, first.refusals, first.injected) == (second.counts, second.refusals, second.injected)
    assert run(store, 8).injected != first.injected


def test_without_faults_nothing_is_refused_but_what_was_given_up(store: Path) -> None:
    report = run(store, rates={}, steps=60)
    assert report.ok
    assert set(report.refusals) <= {"cancelled", "chunk_missing"}
    assert report.injected == {}


def test_a_fault_at_a_chosen_call(store: Path) -> None:
    report = run(store, rates={}, explicit=[Injection("pwritev", 0, Fault.FILL_UP)], steps=40)
    assert report.ok
    assert (report.injected, report.refusals["store_full"]) == ({"fill_up": 1}, 1)


def test_chunks_that_were_damaged_before_are_counted(store: Path) -> None:
    path = next((store / "chunks").glob("*/*.kv"))
    path.write_bytes(path.read_bytes()[:-1])
    report = run(store)
    assert (report.ok, report.sampled, report.damaged_before) == (True, 3, 1)


def test_a_wrong_row_is_found(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FaultyReader.read_into

    def corrupting(self: FaultyReader, layer: int, buffers: list[memoryview]) -> int:
        done = real(self, layer, buffers)
        buffers[0][0] ^= 1
        return done

    monkeypatch.setattr(FaultyReader, "read_into", corrupting)
    report = run(store)
    assert not report.ok
    assert "wrong rows of chunk" in report.failures[0].what


def test_a_lost_chunk_is_found(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = FileTier.write
    monkeypatch.setattr(FileTier, "write", lambda self, *rest: (real(self, *rest), self.path(rest[0].digest).unlink()))
    report = run(store, rates={}, steps=20)
    assert any("acknowledged chunk lost" in failure.what for failure in report.failures)


def test_a_leaked_credit_is_found(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CreditPool, "give_back", lambda self, reservation: True)
    report = run(store, rates={}, steps=20)
    assert any("credits leaked" in failure.what for failure in report.failures)


def test_ctrl_c_removes_what_was_written(store: Path) -> None:
    before = [name for name in tree(store) if name.startswith("chunks")]

    def interrupt(done: int, total: int) -> None:
        if done == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, progress=interrupt)
    assert [name for name in tree(store) if name.startswith(("chunks", "damaged", "tmp"))] == before
