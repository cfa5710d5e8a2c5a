"""Options of the commands that run a model."""

from __future__ import annotations

import os
from typing import Annotated

import typer

__all__ = ["GEMMA_TERMS_VARIABLE", "BudgetOption", "DtypeOption", "GemmaTermsOption", "HostBudgetOption", "ModelOption"]

GEMMA_TERMS_VARIABLE = "KVSTRATA_ACCEPT_GEMMA_TERMS"
"""What the engine asks for; importing the engine only for this name would cost every command seconds."""

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="smollm2, gemma3-270m, a Transformers directory, a .gguf file, or a hub id.",
    ),
]
"""`--model MODEL`; the default is `"smollm2"`."""


def _accept(accepted: bool) -> bool:
    # The processes that a command starts inherit it.
    if accepted:
        os.environ[GEMMA_TERMS_VARIABLE] = "1"
    return accepted


GemmaTermsOption = Annotated[
    bool,
    typer.Option(
        "--accept-gemma-terms",
        callback=_accept,
        help="Accept the Gemma Terms of Use, https://ai.google.dev/gemma/terms, for gemma3-270m.",
    ),
]
"""`--accept-gemma-terms`; the default is `False`. Works by itself: the command need not read it."""

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

HostBudgetOption = Annotated[
    str | None,
    typer.Option("--host-budget", metavar="BYTES", help="Host memory between device and files. Default: none."),
]
"""`--host-budget BYTES`; the default is `None`."""
