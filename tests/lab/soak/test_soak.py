"""A short run of the simulator, the long one behind its marker, and that a seed repeats everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvstrata.errors import ConfigurationError
from kvstrata.lab.soak import SeedResult, run_seed, run_soak
from kvstrata.lab.soak.__main__ import main
from kvstrata.lab.soak.report import as_json, as_table, rare

_FAULTS = ("delay", "shorten", "corrupt", "lose", "duplicate", "fill_up", "die")
_FATES = ("short", "corrupt", "layout", "failed", "lost", "twice")


def _sound(results: list[SeedResult]) -> None:
    assert as_json(results, 1.0)["failures"] == [], as_table(results, 1.0)


def test_twenty_thousand_steps_break_nothing() -> None:
    results = run_soak(20_000)
    _sound(results)
    assert sum(each.steps for each in results) == 20_000
    assert rare(results) == []
    counts = as_json(results, 1.0)["counts"]
    assert all(counts.get(f"copy.{fate}", 0) >= 5 for fate in _FATES)
    assert all(sum(n for name, n in counts.items() if name.endswith(f".{fault}")) for fault in _FAULTS)
    assert counts["transfer.ready"] > 100


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_million_steps_break_nothing() -> None:
    steps, seed = int(os.environ.get("SOAK_STEPS", "1000000")), int(os.environ.get("SOAK_SEED", "0"))
    results = run_soak(steps, seed, processes=2)
    _sound(results)
    assert rare(results) == []


def test_a_seed_repeats_itself_in_another_process_without_pytorch() -> None:
    code = (
        "import sys; from kvstrata.lab.soak import run_seed; r = run_seed(3, 1500);"
        "assert 'torch' not in sys.modules; print(r.trace, r.steps, sum(r.counts.values()))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.split()
        for seed in ("1", "2")
    ]
    here = run_seed(3, 1500)
    assert said == [[here.trace.encode(), b"1500", str(sum(here.counts.values())).encode()]] * 2
    assert run_seed(4, 1500).trace != here.trace


def test_two_processes_do_what_one_does() -> None:
    one, two = run_soak(6_000, seed=7), run_soak(6_000, seed=7, processes=2)
    assert [each.trace for each in one] == [each.trace for each in two]


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "300", "--seed", "5", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["steps"], said["seeds"], said["failures"]) == (True, 300, [5], [])


@pytest.mark.parametrize("name", ["steps", "processes", "seed"])
def test_a_wrong_number_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "-1"]) == 2
    assert f"{name}=-1" in capsys.readouterr().err


def test_a_broken_invariant_is_printed_with_what_reproduces_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvstrata.store.leases import LeaseTable

    monkeypatch.setattr(LeaseTable, "_expire_if_due", lambda table, lease: None)
    assert main(["--steps", "5000"]) == 1
    said = capsys.readouterr().out
    assert "BROKEN: " in said
    assert "python -m kvstrata.lab.soak --seed 0 --steps " in said


def test_numbers_are_checked_before_anything_runs() -> None:
    with pytest.raises(ConfigurationError, match="steps=0"):
        run_soak(0)
