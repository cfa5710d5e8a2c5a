"""Entry of the demo's child processes: `python -m kvstrata.lab.demo_worker JOB STAGE...`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvstrata.errors import KvstrataError
from kvstrata.lab.demo_job import DemoJob, Reporter

__all__ = ["main"]

_REFUSED = 3


def main(arguments: list[str]) -> int:
    """Run stages in order; the result of each goes to a file named after it. Returns the exit code."""
    job, stages = DemoJob.read(Path(arguments[0])), arguments[1:]
    assert tuple(stages) in job.processes
    report = Reporter()
    for stage in stages:
        report.stage(stage)
        report("starting", 0, 0)
        started = time.perf_counter()
        try:
            result = _stage(job, stage)(job, report)
        except KvstrataError as error:
            report.error(type(error).__name__, error.reason, error.cause, error.next_step)
            return _REFUSED
        result["seconds"] = time.perf_counter() - started
        job.file(f"{stage}.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def _stage(job: DemoJob, name: str) -> Callable[[DemoJob, Reporter], dict[str, Any]]:
    # Only what the stage needs is imported: its memory is measured.
    if name in ("prepare", "cold", *job.restored_stages):
        from kvstrata.lab.demo_layered import prepare, read_cold, restore

        return {"prepare": prepare, "cold": read_cold}.get(name) or partial(restore, name)
    from kvstrata.lab.demo_stock import read_stock, time_decoding

    return {"stock": read_stock, "timing": time_decoding}[name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
