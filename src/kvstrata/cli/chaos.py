"""`kvstrata chaos`: work on a store while its disk fails on purpose, and check that no wrong row ever comes out."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstrata.cli.exits import ExitCode
from kvstrata.cli.options import JsonOption, StoreOption
from kvstrata.cli.output import Output
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.lab.chaos import ChaosReport, run_chaos
from kvstrata.store import Store
from kvstrata.tiers.fault_plan import Fault, Injection
from kvstrata.tiers.filesystem import storage_error

__all__ = ["register"]

_DEFAULT = [fault for fault in Fault if fault is not Fault.HANG]
_DEATHS_SHARE = 50


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chaos", epilog="Example: `kvstrata chaos --store ./store --steps 2000 --seed 7`")(chaos)


def chaos(
    store: StoreOption,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Writes, reads, verifications and removals.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Decides everything; the same seed does the same.")] = 0,
    rate: Annotated[float, typer.Option("--rate", help="Probability of a fault at each call.")] = 0.1,
    faults: Annotated[
        str, typer.Option("--faults", metavar="LIST", help="Faults to inject, with commas between them.")
    ] = ",".join(_DEFAULT),
    inject: Annotated[
        list[str] | None,
        typer.Option("--inject", metavar="OPERATION:CALL:FAULT", help="One fault at a chosen call; may be repeated."),
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="On the store itself instead of a copy.")] = False,
    json: JsonOption = False,
) -> int:
    """Check that every read is right or refused, whatever fails. Exit code 1 on a wrong row, a loss or a leak.

    Works on a temporary copy of the store unless told otherwise; chunks found in it are read, never changed.
    """
    rates, explicit = _rates(faults, rate), tuple(_injection(text) for text in inject or ())
    output = Output(json)
    with _place(store, in_place) as path, output.progress("steps") as report:
        found = run_chaos(path, steps=steps, seed=seed, rates=rates, explicit=explicit, progress=report)
    data = {"path": str(store), "in_place": in_place, "ok": found.ok, **found.to_json()}
    output.result(data, _text(found))
    return ExitCode.OK if found.ok else ExitCode.CHECK_FAILED


@contextlib.contextmanager
def _place(store: Path, in_place: bool) -> Iterator[Path]:
    with Store(store, create=False) as opened:
        path = opened.path
        if in_place:
            opened.require_writable()
    if in_place:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="kvstrata-chaos-") as folder:
        copy = Path(folder) / "store"
        try:
            shutil.copytree(path, copy, ignore=shutil.ignore_patterns("tmp"))
        except (OSError, shutil.Error) as error:
            # What copytree collects carries no number of its own.
            cause = error if error.errno else OSError(str(error))
            raise storage_error(cause, f"copying {path} to {folder}") from error
        yield copy


def _rates(names: str, rate: float) -> dict[Fault, float]:
    if not 0 <= rate <= 1:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"--rate={rate} must lie between 0 and 1")
    wanted = [_fault(name.strip()) for name in names.split(",") if name.strip()]
    if Fault.HANG in wanted:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, "--faults: hang would stop this command, which has one thread", "leave it out"
        )
    # A death costs a new start, and a run of nothing else shows little.
    weights = {fault: 1 / _DEATHS_SHARE if fault is Fault.DIE else 1.0 for fault in wanted}
    total = sum(weights.values())
    return {fault: rate * weight / total for fault, weight in weights.items()}


def _injection(text: str) -> Injection:
    parts = text.split(":")
    if len(parts) != 3 or not parts[1].isdecimal():
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"--inject={text!r} is not OPERATION:CALL:FAULT", "for example pwritev:3:corrupt"
        )
    return Injection(parts[0], int(parts[1]), _fault(parts[2]))


def _fault(name: str) -> Fault:
    try:
        return Fault(name)
    except ValueError:
        known = ", ".join(Fault)
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"there is no fault {name!r}; known: {known}") from None


def _text(report: ChaosReport) -> Group:
    table = Table.grid(padding=(0, 2))
    rows: list[tuple[str, Any]] = [
        ("seed, steps", f"{report.seed}, {report.steps}"),
        ("chunks of the store", f"{report.sampled} read, {report.damaged_before} were damaged before"),
        ("done", _counted(report.counts)),
        ("refused", _counted(report.refusals)),
        ("injected", _counted(report.injected)),
    ]
    for label, value in rows:
        table.add_row(Text(label), Text(value))
    lines = [Text(f"step {each.step}: {each.what}; injected: {list(each.injected)}") for each in report.failures]
    verdict = "every read was right or refused; nothing was lost, nothing leaked" if report.ok else "FAILED"
    return Group(table, *lines, Text(verdict))


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"
