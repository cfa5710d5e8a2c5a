"""`kvstrata demo`: every claim measured on this machine, with a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvstrata.cli.exits import ExitCode, exit_code
from kvstrata.cli.model_options import DtypeOption, GemmaTermsOption, ModelOption
from kvstrata.cli.options import JsonOption
from kvstrata.cli.output import Output
from kvstrata.lab.demo import FULL_TOKENS, QUICK_TOKENS, DemoOptions, DemoOutcome, run_demo

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", epilog="Example: `kvstrata demo --out demo-out --quick`")(demo)


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where summary.json and report.html go.")] = Path(
        "demo-out"
    ),
    quick: Annotated[bool, typer.Option("--quick", help=f"Read {QUICK_TOKENS} tokens, not {FULL_TOKENS}.")] = False,
    model: ModelOption = "smollm2",
    accept_gemma_terms: GemmaTermsOption = False,
    dtype: DtypeOption = "auto",
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="N", help="Length of the prompt.")] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", metavar="N", help="Length of the answer.")] = 32,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="BYTES", help="Device memory, like 64MiB. Default: a quarter of the history."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="PATH", help="Keep the history there. Default: below --out, then removed."),
    ] = None,
    restores: Annotated[
        int, typer.Option("--restores", metavar="N", help="New processes that restore, each what the one before saved.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Chooses the text and the planted fact.")] = 0,
    json: JsonOption = False,
) -> int:
    """Let a model read more than its memory holds, answer, stop, and answer again in a new process.

    The stock Transformers cache does the same work beside it. Exit code 1 when a check fails.
    """
    output = Output(json)
    options = DemoOptions(out, model, dtype, quick, tokens, new_tokens, budget, store, seed, restores)
    with _Display() as display:
        outcome = run_demo(options, display.show)
    output.result(outcome.summary, _text(options, outcome))
    if outcome.failure is not None:
        failure = outcome.failure
        next_step = failure.error.next_step if failure.error else f"the log is {outcome.work}/{failure.stage}.log"
        sys.stderr.write(f"error: stage {failure.stage}: {failure.detail}\n  next: {next_step}\n")
        return exit_code(failure.error) if failure.error else ExitCode.CHECK_FAILED
    return ExitCode.OK if outcome.passed else ExitCode.CHECK_FAILED


class _Display:
    """Progress on stderr: a live line on a terminal, else one line for every stage and activity."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True), disable=not self._live)
        self._last: tuple[str, str] | None = None
        self._task = self._bars.add_task("starting", total=None)

    def __enter__(self) -> _Display:
        self._bars.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._bars.stop()

    def show(self, stage: str, what: str, done: int, total: int) -> None:
        """One event of the demo."""
        changed = (stage, what) != self._last
        self._last = (stage, what)
        if not self._live:
            if changed:
                sys.stderr.write(f"{stage}: {what}\n")
            return
        if changed:
            self._bars.reset(self._task, description=f"{stage}: {what}", total=total or None)
        self._bars.update(self._task, completed=done, total=total or None)


def _text(options: DemoOptions, outcome: DemoOutcome) -> Group:
    table = Table.grid(padding=(0, 2))
    for check in outcome.summary["checks"]:
        mark = {True: Text("ok", "green"), False: Text("FAILED", "bold red"), None: Text("info", "dim")}[check["ok"]]
        table.add_row(mark, Text(check["name"]), Text(check["detail"], "dim"))
    where = Text(f"{options.out / 'report.html'}  {options.out / 'summary.json'}  {outcome.summary['seconds']:.0f} s")
    return Group(table, where)
