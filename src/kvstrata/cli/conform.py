"""`kvstrata conform`: published figures computed again, and wrong inputs refused."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstrata.cli.exits import ExitCode
from kvstrata.cli.options import JsonOption
from kvstrata.cli.output import Output
from kvstrata.lab.conform import TOPICS, TopicReport, run_topics

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("conform", epilog="Example: `kvstrata conform manifest --json`")(conform)


def conform(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC]...", help=f"Of {', '.join(TOPICS)}; all without one.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Check published figures and refusals. Exit code 1 when a figure differs or something wrong is accepted."""
    output = Output(json)
    for name in topics or ():
        if name not in TOPICS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(TOPICS)}", param_hint="TOPIC")
    with output.progress("topics") as progress:
        report = run_topics(topics or (), progress)
    output.result(report.to_json(), Group(*(_table(topic) for topic in report.topics)))
    return ExitCode.OK if report.ok else ExitCode.CHECK_FAILED


def _table(topic: TopicReport) -> RenderableType:
    table = Table(title=topic.topic)
    for column in ("figure", "published", "computed", "agrees"):
        table.add_column(column, overflow="fold")
    for figure in topic.figures:
        mark = {True: "yes", False: "NO", None: "open"}[figure.ok]
        table.add_row(figure.key, str(figure.published), str(figure.computed), mark)
    refusals = topic.refusals
    lines = [f"refused {refusals.refused} of {refusals.expected} wrong inputs"]
    lines += [f"  {item['field']}: expected {item['expected']}, found {item['found']}" for item in refusals.failed]
    return Group(table, Text("\n".join(lines)))
