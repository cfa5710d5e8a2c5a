"""What the processes of the demo tell each other: one job file in, lines of events and one result file out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["CHUNKINGS", "RESTORED", "DemoJob", "Reporter"]

RESTORED = "restored"
"""The first restored stage; further ones are `restored-2`, `restored-3` and so on."""

CHUNKINGS = ((256, 512), (128, 256), (64, 128), (64, 64), (64, 32), (64, 16))
"""(chunk_tokens, prefill_chunk), best first; the first that the budget can hold is used."""


@dataclass(frozen=True)
class DemoJob:
    """Everything a stage needs. Written once by the parent, read by every child.

    model, dtype: as for `load_model`. tokens: length of the prompt. new_tokens: length of the answer. budget: as for
    `attach`, or `None` for a quarter of the history. store: directory of the store. work: directory for what the stages
    pass on. salt: keeps the chunks of this run apart from those of earlier ones in the same store. restores: processes
    that restore, each what the one before it saved. rounds: interleaved rounds of the timing stage, of `steps` steps
    each.
    """

    model: str
    dtype: str
    tokens: int
    new_tokens: int
    budget: str | None
    store: str
    work: str
    salt: str
    restores: int = 1
    session: str = "demo"
    seed: int = 0
    rounds: int = 5
    steps: int = 4

    @property
    def restored_stages(self) -> tuple[str, ...]:
        """The stages that restore, in order."""
        return RESTORED, *(f"{RESTORED}-{number}" for number in range(2, self.restores + 1))

    @property
    def processes(self) -> tuple[tuple[str, ...], ...]:
        """Stages in order, by the process that runs them: importing the libraries takes longer than most stages."""
        return ("prepare", "cold"), *((stage,) for stage in self.restored_stages), ("stock", "timing")

    def saver(self, stage: str) -> str:
        """The stage whose session a restored stage restores."""
        place = self.restored_stages.index(stage)
        return self.restored_stages[place - 1] if place else "cold"

    def write(self, path: Path) -> None:
        """Save as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> DemoJob:
        """What `write` saved."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def file(self, name: str) -> Path:
        """A file in the work directory."""
        return Path(self.work) / name

    def logits(self, stage: str) -> Path:
        """The stage's logits, float32 [new_tokens, vocabulary]."""
        return self.file(f"{stage}.logits")

    def result(self, stage: str) -> dict[str, Any]:
        """What an earlier stage reported."""
        found: dict[str, Any] = json.loads(self.file(f"{stage}.json").read_text(encoding="utf-8"))
        return found

    def prompt(self) -> list[int]:
        """Token ids of the reading task."""
        ids: list[int] = json.loads(self.file("prompt.json").read_text(encoding="utf-8"))
        return ids


class Reporter:
    """The child's voice: one JSON object a line on stdout.

    A parent that has gone shows as a broken pipe, which ends the child.
    """

    def stage(self, name: str) -> None:
        """A stage of the process begins."""
        self._send({"event": "stage", "name": name})

    def __call__(self, what: str, done: int, total: int) -> None:
        """Progress of one activity."""
        self._send({"event": "progress", "what": what, "done": done, "total": total})

    def error(self, kind: str, reason: str, cause: str, next_step: str) -> None:
        """Why the stage cannot go on."""
        self._send({"event": "error", "kind": kind, "reason": reason, "cause": cause, "next_step": next_step})

    def _send(self, event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
