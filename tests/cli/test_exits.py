"""Every error has an exit code that a script can tell apart."""

from __future__ import annotations

import pytest

from kvstrata.cli.exits import ExitCode, exit_code
from kvstrata.errors import (
    BudgetError,
    ConfigurationError,
    DamagedError,
    KernelUnavailable,
    KvstrataError,
    ModelLoadError,
    Reason,
    SessionError,
    StateError,
    StoreError,
    UnsupportedError,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConfigurationError, ExitCode.REFUSED),
        (UnsupportedError, ExitCode.REFUSED),
        (StateError, ExitCode.REFUSED),
        (KernelUnavailable, ExitCode.REFUSED),
        (ModelLoadError, ExitCode.REFUSED),
        (StoreError, ExitCode.STORE),
        (DamagedError, ExitCode.STORE),
        (SessionError, ExitCode.SESSION),
        (BudgetError, ExitCode.BUDGET),
    ],
)
def test_exit_codes(kind: type[KvstrataError], code: ExitCode) -> None:
    assert exit_code(kind(Reason.CLOSED, "cause")) is code
