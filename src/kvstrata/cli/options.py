"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["STORE_VARIABLE", "JsonOption", "StoreOption", "TenantOption", "default_store"]

STORE_VARIABLE = "KVSTRATA_STORE"


def default_store() -> Path:
    """Where sessions are kept when nothing else is said: `$XDG_DATA_HOME/kvstrata`, or `~/.local/share/kvstrata`."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "kvstrata"


StoreOption = Annotated[
    Path,
    typer.Option(
        "--store",
        metavar="PATH",
        envvar=STORE_VARIABLE,
        default_factory=default_store,
        show_default="~/.local/share/kvstrata",
        help="Directory of the store.",
    ),
]
"""`--store PATH`; declare it without a default."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
"""`--json`; the default is `False`."""

TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Owner of the session.")]
"""`--tenant NAME`; the default is `"default"`."""
