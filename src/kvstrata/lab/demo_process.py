"""A process of the demo and its stages, seen from the parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata import errors
from kvstrata.errors import KvstrataError, Reason
from kvstrata.lab.demo_job import DemoJob

__all__ = ["Progress", "StageFailure", "run_stages"]

Progress = Callable[[str, str, int, int], None]
"""Called with stage, activity, done and total."""

_TAIL_LINES = 12
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class StageFailure:
    """A stage that did not finish. error: the refusal, if the child named one; else it crashed or was killed."""

    stage: str
    detail: str
    error: KvstrataError | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        reason = str(self.error.reason) if self.error else None
        next_step = self.error.next_step if self.error else ""
        return {"stage": self.stage, "detail": self.detail, "reason": reason, "next_step": next_step}


def run_stages(stages: Sequence[str], job: DemoJob, progress: Progress) -> Iterator[dict[str, Any] | StageFailure]:
    """Run `stages` in one new process and wait for it; the result of each in order, the last maybe why there is none.

    The child is ended when this call is left by an exception, KeyboardInterrupt included.
    """
    stage, log = stages[0], job.file(f"{stages[0]}.log")
    command = [sys.executable, "-m", "kvstrata.lab.demo_worker", str(job.file("job.json")), *stages]
    refusal: KvstrataError | None = None
    # Waiting OpenMP threads that spin make one busy neighbour on the machine cost a multiple of its share.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    # A session of its own: Ctrl-C reaches the parent alone, which then ends the child.
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        ) as child,
    ):
        try:
            assert child.stdout is not None
            for line in child.stdout:
                event = _event(line)
                if event.get("event") == "stage":
                    stage = event["name"]
                elif event.get("event") == "progress":
                    progress(stage, event["what"], event["done"], event["total"])
                elif event.get("event") == "error":
                    refusal = _refusal(event)
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    for name in stages:
        if job.file(f"{name}.json").exists():
            yield job.result(name)
            continue
        yield StageFailure(name, refusal.cause, refusal) if refusal else StageFailure(stage, _why(code, log))
        return


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _refusal(event: dict[str, Any]) -> KvstrataError:
    kind = getattr(errors, event["kind"], KvstrataError)
    error: KvstrataError = kind(Reason(event["reason"]), event["cause"], event["next_step"])
    return error


def _why(code: int, log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        how = f"the process was ended by {name}"
        if name == "SIGKILL":
            how += " (by hand, or by the system when memory ran out)"
    else:
        how = f"the process ended with exit code {code}"
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([how, *tail])


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
