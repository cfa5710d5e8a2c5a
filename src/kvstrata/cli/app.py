"""Builds the application from the modules of this folder and turns every ending into an exit code."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import kvstrata.cli
from kvstrata.cli.exits import ExitCode, exit_code
from kvstrata.cli.output import Output, OutputClosed
from kvstrata.errors import KvstrataError, Reason

__all__ = ["build_app", "run", "version"]

_HELP = """Keep a language model's K/V cache in layers of memory, and move it without losing or mixing it.

Every command takes --json. Exit codes: 0 done, 1 a check failed, 2 what was asked is wrong, 3 model, mode or machine,
4 store, 5 session, 6 memory budget, 130 interrupted.
"""
_CLICK_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def version() -> str:
    """The installed version, or `unknown` for a source tree that was never installed."""
    try:
        return importlib.metadata.version("kvstrata")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def build_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The application with the command that `arguments` name, or with all of them for a help text."""
    app = typer.Typer(help=_HELP, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        if show_version:
            Output(as_json=False).line(f"kvstrata {version()}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            Output(as_json=False).line(context.get_help())

    for module in _modules(arguments):
        register = getattr(importlib.import_module(f"kvstrata.cli.{module}"), "register", None)
        if register is not None:
            register(app)
    return app


def _modules(arguments: Sequence[str]) -> list[str]:
    """Importing one module instead of all keeps commands that need no model free of PyTorch's import time."""
    if list(arguments) == ["--version"]:
        return []
    found = sorted(item.name for item in pkgutil.iter_modules(kvstrata.cli.__path__))
    command = next((word for word in arguments if not word.startswith("-")), "")
    return [name for name in found if name in {command, f"{command}_commands"}] or found


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Mistakes of the user end in one message, never in a traceback."""
    for name in ("stdout", "stderr"):
        # `>&-` leaves no stream at all.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    output = Output(as_json="--json" in arguments)
    try:
        return _run(arguments, output)
    except OutputClosed:
        _discard_stdout()
        return ExitCode.OK


def _run(arguments: list[str], output: Output) -> int:
    try:
        command = typer.main.get_command(build_app(arguments))
        result = command.main(args=arguments, prog_name="kvstrata", standalone_mode=False)
    except KvstrataError as error:
        output.error(error.reason, error.cause, error.next_step)
        return exit_code(error)
    except (typer.Abort, KeyboardInterrupt):
        result = int(ExitCode.INTERRUPTED)
    except _CLICK_ERROR as error:
        return _usage(error, output)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise OutputClosed from end
        result = end.code
    if result == ExitCode.INTERRUPTED:
        # A command that says itself what it leaves returns the member; an exception becomes the plain number.
        if not isinstance(result, ExitCode):
            output.interrupted()
        output.note("interrupted; what was stored before is intact")
    return result if isinstance(result, int) else ExitCode.OK


def _usage(error: Exception, output: Output) -> ExitCode:
    if output.as_json:
        output.error(Reason.INVALID_ARGUMENT, error.format_message(), "see `kvstrata COMMAND --help`")  # type: ignore[attr-defined]
    else:
        error.show()  # type: ignore[attr-defined]
    return ExitCode.USAGE


def _discard_stdout() -> None:
    """What is still buffered for a reader that has gone must not raise when the interpreter ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
