"""`kvstrata bench`: figures as ratios, each beside a baseline of the same run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstrata.cli.exits import ExitCode
from kvstrata.cli.model_options import GemmaTermsOption, ModelOption
from kvstrata.cli.options import JsonOption
from kvstrata.cli.output import Output
from kvstrata.lab.bench import BENCHES, BenchReport, run_bench
from kvstrata.lab.bench.result import BenchTable

__all__ = ["register"]


_OF_METHODS = ("methods", "needles", "break-even")
_OF_MODELS = tuple(name for name in BENCHES if name not in ("store", *_OF_METHODS))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", epilog="Example: `kvstrata bench decode --json`")(bench)


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(BENCHES)}, or `all`.")] = "all",
    model: ModelOption = "smollm2",
    accept_gemma_terms: GemmaTermsOption = False,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="Repeat for several; default: the bench's.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="History length; default: the bench's.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Interleaved rounds.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small and few, to see that `store`, `methods` or `needles` runs.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of what `store` makes up, and of methods that draw.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure. Exit code 1 when a figure misses its goal; the figures are printed all the same."""
    output = Output(json)
    if name not in (*BENCHES, "all"):
        raise typer.BadParameter(f"{name!r} is none of {', '.join(BENCHES)}, all", param_hint="NAME")
    _refuse_unused(name, {"--dtype": dtype, "--tokens": tokens, "--rounds": rounds, "--quick": quick, "--seed": seed})
    names = list(BENCHES) if name == "all" else [name]
    reports = []
    for each in names:
        output.note(f"bench {each} ...")
        settings = _settings(each, model, dtype, tokens, rounds) if each in _OF_MODELS else {"quick": quick}
        if each == "store":
            settings |= _given(rounds=rounds, seed=seed)
        if each in _OF_METHODS:
            # In full they take an hour: with `all`, they show that they run.
            settings["quick"] = quick or name == "all"
            settings |= {"source": model} | _given(dtype=dtype[0] if dtype else None)
            if each == "break-even":
                settings |= _given(rounds=rounds, lengths=[tokens] if tokens else None)
            else:
                settings |= _given(tokens=tokens, seed=seed)
        reports.append(run_bench(each, progress=lambda text: output.note(f"  {text}"), **settings))
    data: dict[str, Any] = (
        reports[0].to_json() if name != "all" else {"benches": [report.to_json() for report in reports]}
    )
    output.result(data, Group(*(_table(report) for report in reports)))
    return ExitCode.OK if all(report.met for report in reports) else ExitCode.CHECK_FAILED


def _settings(
    name: str, model: str, dtype: list[str] | None, tokens: int | None, rounds: int | None
) -> dict[str, object]:
    settings: dict[str, object] = {"source": model}
    if dtype:
        settings |= {"dtype": dtype[0]} if name == "memory" else {"dtypes": dtype}
    if tokens:
        settings |= {"lengths": [tokens]} if name in ("decode", "compile") else {"tokens": tokens}
    if rounds and name != "memory":
        settings |= {"rounds": rounds}
    return settings


def _given(**settings: object) -> dict[str, object]:
    return {name: value for name, value in settings.items() if value is not None}


def _refuse_unused(name: str, options: dict[str, object]) -> None:
    """An option that would change nothing is a mistake, but not with `all`, where some bench takes it."""
    if name == "all":
        return
    unused = {"store": ("--dtype", "--tokens"), **dict.fromkeys(_OF_METHODS, ("--rounds",)), "break-even": ("--seed",)}
    for option in unused.get(name, ("--quick", "--seed")):
        if options[option] not in (None, False):
            raise typer.BadParameter(f"{name!r} has no such setting", param_hint=option)


def _table(report: BenchReport) -> RenderableType:
    table = Table(title=f"{report.bench}, {report.environment['threads']} threads, {report.environment['cpu']}")
    for column in ("figure", "value", "baseline", "ratio (95 %)", "goal", "met", "n", "class"):
        table.add_column(column)
    for row in report.rows:
        bounds = f" ({row.low:.3f}-{row.high:.3f})" if row.low is not None and row.high is not None else ""
        table.add_row(
            row.name,
            f"{row.value:.4g} {row.unit}",
            "" if row.baseline is None else f"{row.baseline:.4g}",
            "" if row.ratio is None else f"{row.ratio:.3f}{bounds}",
            row.goal,
            {True: "yes", False: "NO", None: ""}[row.met],
            str(row.n),
            row.evidence,
        )
    return Group(table, *(_lines(each) for each in report.tables), Text(""))


def _lines(found: BenchTable) -> Table:
    table = Table(title=found.title)
    for column in found.columns:
        table.add_column(column, overflow="fold")
    for line in found.lines:
        table.add_row(*("" if cell is None else cell if isinstance(cell, str) else f"{cell:.4g}" for cell in line))
    return table
