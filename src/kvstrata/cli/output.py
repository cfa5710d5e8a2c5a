"""How commands speak: results on stdout, as text or as one JSON object, progress and messages on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstrata.errors import Reason, StoreError

__all__ = ["Output", "OutputClosed", "byte_text"]

_PLAIN_WIDTH = 160


class OutputClosed(Exception):  # noqa: N818
    """The reader of stdout has gone, e.g. `| head`: the end of the command, not an error."""


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise OutputClosed


class Output:
    """Where one command writes. With `as_json`, `result` prints one JSON object and nothing else goes to stdout."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def result(self, data: Mapping[str, Any], text: RenderableType) -> None:
        """Print `data` as JSON or `text` for people. Errors: `OutputClosed`."""
        if self.as_json:
            self.line(json.dumps(data, indent=2, ensure_ascii=False, default=_plain))
        else:
            width = None if sys.stdout.isatty() else _PLAIN_WIDTH
            console = _Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
            with _refusing():
                console.print(text)
                sys.stdout.flush()

    def line(self, text: str) -> None:
        """Print `text` and a newline as they are. Errors: `OutputClosed`, `StoreError` where stdout takes no more."""
        self._write(text + "\n")

    def piece(self, text: str) -> None:
        """Print a piece of streamed text as it is; nothing with `as_json`. Errors: `OutputClosed`."""
        if not self.as_json:
            self._write(text)

    def _write(self, text: str) -> None:
        with _refusing():
            sys.stdout.write(text)
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """A message for people on stderr; nothing with `as_json`."""
        if not self.as_json:
            sys.stderr.write(text + "\n")

    def error(self, reason: str, cause: str, next_step: str) -> None:
        """One message on stderr, or `{"error": {"reason", "cause", "next_step"}}` on stdout."""
        if self.as_json:
            error = {"error": {"reason": str(reason), "cause": cause, "next_step": next_step}}
            with contextlib.suppress(StoreError):
                self.line(json.dumps(error, indent=2))
                return
        sys.stderr.write(f"error: {cause} [{reason}]\n" + (f"  next: {next_step}\n" if next_step else ""))

    def interrupted(self) -> None:
        """`{"interrupted": true}` on stdout, for a command that had nothing more to say; nothing without `as_json`."""
        if self.as_json:
            with contextlib.suppress(StoreError, OutputClosed):
                self.line(json.dumps({"interrupted": True}))

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Yields `report(done, total)`, which draws a bar on stderr when that is a terminal."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        quiet = self.as_json or not sys.stderr.isatty()
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise StoreError(
            Reason.STORE_IO, f"stdout cannot be written: {error.strerror}", "write to a place with free space"
        ) from error


def byte_text(count: float) -> str:
    """`count` bytes for people, e.g. `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
