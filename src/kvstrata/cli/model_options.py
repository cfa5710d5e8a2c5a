"""Options of the commands that run a model."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from kvstrata.errors import ConfigurationError, Reason

__all__ = [
    "GEMMA_TERMS_VARIABLE",
    "BudgetOption",
    "DtypeOption",
    "GemmaTermsOption",
    "HostBudgetOption",
    "MethodOption",
    "MinHistoryOption",
    "ModelOption",
    "RowsOption",
    "selection_options",
]

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

MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        help="Read a chosen part of a long history, like quest:page_size=16: approximate. Default: exact.",
    ),
]
"""`--method METHOD`; the default is `None`."""

RowsOption = Annotated[
    int | None,
    typer.Option("--rows", metavar="N", min=1, help="With --method: rows that enter attention for each owner."),
]
"""`--rows N`; the default is `None`."""

MinHistoryOption = Annotated[
    int | None,
    typer.Option(
        "--min-history", metavar="TOKENS", min=1, help="With --method: from which length on rows are chosen. [1024]"
    ),
]
"""`--min-history TOKENS`; the default is `None`."""


def selection_options(method: str | None, rows: int | None, min_history: int | None) -> dict[str, Any]:
    """Arguments of `attach` for `--method`, `--rows` and `--min-history`; none of them for an exact answer.

    Errors: `ConfigurationError` for a method without rows, the others without a method, and what the method refuses.
    """
    if method is None:
        given = [name for name, value in (("--rows", rows), ("--min-history", min_history)) if value is not None]
        if given:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"{' and '.join(given)} without --method",
                "pass --method quest, or leave them away for an exact answer",
            )
        return {}
    if rows is None:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"--method {method} without --rows", "say how many rows may enter: --rows 512"
        )
    from kvstrata.contract.budget import Rows
    from kvstrata.methods.registry import parse_method

    return {"method": parse_method(method), "mode": "approximate", "rows": Rows(rows), "min_history": min_history}
