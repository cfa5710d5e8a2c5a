"""Options of the commands that run a model."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["BudgetOption", "DtypeOption", "ModelOption"]

ModelOption = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", help="smollm2, a Transformers directory, a .gguf file, or a hub id."),
]
"""`--model MODEL`; the default is `"smollm2"`."""

DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="DTYPE", help="auto, float32 or bfloat16. auto: bfloat16 where the CPU computes it natively."
    ),
]
"""`--dtype DTYPE`; the default is `"auto"`."""

BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", metavar="BYTES", help="Device memory, like 64MiB. Default: the model's whole context."),
]
"""`--budget BYTES`; the default is `None`."""
