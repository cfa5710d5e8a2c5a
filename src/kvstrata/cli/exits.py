"""What each exit code of `kvstrata` means."""

from __future__ import annotations

from enum import IntEnum

from kvstrata.errors import BudgetError, ConfigurationError, KvstrataError, SessionError, StoreError

__all__ = ["ExitCode", "exit_code"]


class ExitCode(IntEnum):
    """Exit codes of every command.

    OK: done, also when the reader of a pipe has gone. CHECK_FAILED: the command ran and what it checked is not right,
    e.g. damage was found. INTERRUPTED: Ctrl-C; nothing that was stored is lost.

    The others tell what refused. REFUSED: the model, the mode or the machine. STORE: the store cannot be used.
    SESSION: a session name that is illegal or unknown, or a session that is damaged. BUDGET: the memory budget is too
    small. USAGE: anything else in what was asked is wrong, be it seen while the command line is read or later.
    """

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    REFUSED = 3
    STORE = 4
    SESSION = 5
    BUDGET = 6
    INTERRUPTED = 130


def exit_code(error: KvstrataError) -> ExitCode:
    """The exit code that tells `error` to a script."""
    match error:
        case StoreError():
            return ExitCode.STORE
        case SessionError():
            return ExitCode.SESSION
        case BudgetError():
            return ExitCode.BUDGET
        case ConfigurationError():
            return ExitCode.USAGE
        case _:
            return ExitCode.REFUSED
