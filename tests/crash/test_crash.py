"""Writers die with SIGKILL; whoever opens the store next finds nothing torn, nothing resurrected and nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HARNESS = Path(__file__).parent.parent / "support" / "crash_harness.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(HARNESS.parent)])}


def crash(kills: int, seed: int) -> dict[str, Any]:
    """The harness's report. It runs in a process of its own, which never imports PyTorch."""
    command = [sys.executable, str(HARNESS), "--kills", str(kills), "--seed", str(seed)]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return dict(json.loads(result.stdout))


def assert_nothing_happened(report: dict[str, Any]) -> None:
    assert report["problems"] == []
    counts = {name: report[name] for name in ("torn", "resurrected", "lost", "left_over", "errors")}
    assert counts == dict.fromkeys(counts, 0)
    assert report["chunks_verified"] > report["kills"]


def test_a_few_kills() -> None:
    report = crash(20, 1)
    assert_nothing_happened(report)
    assert report["kills"] == 20
    assert report["dead_processes"] > 0


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_many_kills(capsys: pytest.CaptureFixture[str]) -> None:
    report = crash(int(os.environ.get("CRASH_KILLS", "1000")), int(os.environ.get("CRASH_SEED", "0")))
    with capsys.disabled():
        print(json.dumps(report, indent=2))
    assert_nothing_happened(report)
    assert report["kills"] >= 500
    assert report["recovered_intents"] > 0
    assert report["recovered_deletions"] > 0
    assert report["kills_beside_live_writers"] > 50
