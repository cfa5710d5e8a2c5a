"""The command line: `kvstrata`. Parses, calls, prints.

Every module of this folder that has a function `register(app)` adds its commands; nothing else has to know about it.
`NAME.py`, or `NAME_commands.py` for a group, holds the command NAME; only that module is imported to run it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvstrata.cli.exits import ExitCode

__all__ = ["ExitCode", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvstrata` with `argv`, by default that of the process, without the program's name; returns the exit code."""
    try:
        from kvstrata.cli.app import run

        return run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich", "click"}:
            raise
        sys.stderr.write(f"error: the command line needs {error.name}\n  next: pip install 'kvstrata[cli]'\n")
        return ExitCode.REFUSED
